"""Several tasks with one model."""
