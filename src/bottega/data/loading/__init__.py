"""From samples to batches at the time they are needed: the loader, its workers and how batches travel."""
