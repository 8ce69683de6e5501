"""The model that denoises: a backbone (DiT, UNet, or a transformer over codes) and its condition."""
