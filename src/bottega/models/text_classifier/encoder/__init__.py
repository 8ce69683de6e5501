"""The transformer text classifier from scratch, in torch and in JAX."""
