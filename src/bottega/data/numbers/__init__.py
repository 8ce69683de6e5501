"""Rows of numbers as samples."""
