"""Folders of diffusers pipelines: their parts, schedules and tokens."""
