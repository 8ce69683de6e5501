"""Kim's convolutional text classifier, in torch and in JAX."""
