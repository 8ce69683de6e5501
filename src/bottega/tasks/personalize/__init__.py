"""Personalised image generation with soft prompts between frozen models."""
