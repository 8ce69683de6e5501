"""Diagnosis of a run: rules over what it has recorded, each with its evidence and one override to try."""
