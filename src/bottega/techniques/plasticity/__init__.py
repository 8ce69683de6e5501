"""Spike-timing-dependent plasticity beside the gradient."""
