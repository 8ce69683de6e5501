"""Plots as PNG files: metrics, confusion matrices, comparisons, spikes and spectrograms, drawn by matplotlib."""
