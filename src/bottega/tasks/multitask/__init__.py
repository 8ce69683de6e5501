"""Multitask learning: several tasks with one model."""
