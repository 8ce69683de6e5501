"""Engines: where training is computed, one folder per framework."""
