"""The seams and the rules that hold for every task and engine. No torch, no jax."""
