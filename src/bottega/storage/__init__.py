"""Files on disk, below everything else: flushed, replaced whole, hashed while they are written."""
