"""Autoencoders: images, sound or video to latents (VAE) or codes (tokens) and back."""
