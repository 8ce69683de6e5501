"""Associative recall with memory."""
