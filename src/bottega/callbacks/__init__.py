"""Callbacks of the training loop, one file each: console, logs, TensorBoard, early stopping. None of them sees the weights."""
