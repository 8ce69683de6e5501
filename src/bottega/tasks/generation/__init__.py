"""Generation of images, sound and video: diffusion and flow matching, in pixels, latents or codes."""
