"""Durable files: flushed to disk, replaced atomically, hashed while they are written."""
