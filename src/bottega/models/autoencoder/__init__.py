"""Autoencoders, continuous (VAE) and discrete (VQ and FSQ), and their layout in diffusers."""
