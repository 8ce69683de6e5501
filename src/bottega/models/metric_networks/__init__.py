"""Networks that only measure: Inception for the FID, and perceptual distances."""
