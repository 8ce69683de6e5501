"""Who watches: one file, one watcher. None of them sees the weights."""
