"""Elastic weight consolidation."""
