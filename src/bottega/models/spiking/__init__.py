"""Spiking neural networks: units, spike coding, surrogate gradients and spike-timing-dependent plasticity."""
