"""Sound: from files to batches and back to files that can be heard and seen."""
