"""Folders of diffusers pipelines: components, noise schedules and tokenizers."""
