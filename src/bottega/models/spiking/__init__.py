"""Networks of spiking units: the units, their codes and surrogate gradients, and spike-timing-dependent plasticity."""
