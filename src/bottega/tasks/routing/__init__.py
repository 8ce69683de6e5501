"""Routing of samples between experts."""
