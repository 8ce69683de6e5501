"""Hierarchical memory: working, episodic and semantic."""
