"""Low-rank adaptation (LoRA)."""
