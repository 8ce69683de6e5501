"""Associative recall with a memory beyond the context."""
