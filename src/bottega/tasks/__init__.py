"""One file, one thing to learn."""
