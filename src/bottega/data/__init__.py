"""What is seen: sources, order, loader, tokenizers. No torch, no jax."""
