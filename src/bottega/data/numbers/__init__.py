"""Vectors: rows of numbers from tables and arrays, and the synthetic data of the routing task."""
