"""Networks of metrics: Inception for the FID, and perceptual distances."""
