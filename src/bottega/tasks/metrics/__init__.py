"""Metrics of samples and predictions: pure functions of NumPy arrays, the same for every engine."""
