"""Autoencoders: images, audio or video to latents (VAE) or codes (tokens) and back."""
