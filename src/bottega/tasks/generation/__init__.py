"""Generation of images, audio and video: diffusion and flow matching, in pixels, latents or codes."""
