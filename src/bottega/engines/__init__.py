"""Where it happens: one file, one framework."""
