"""The diffusion transformer, and its layout in diffusers."""
