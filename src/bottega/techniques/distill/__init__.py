"""Distillation from a teacher."""
