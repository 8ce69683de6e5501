"""Autoencoders, continuous (VAE) and discrete (codes), and their layout in diffusers."""
