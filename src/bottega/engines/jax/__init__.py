"""The JAX engine: one jitted, donated training step over micro-batches and devices."""
