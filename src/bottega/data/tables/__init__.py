"""Prepared data on disk: shards, the cache that holds them, and how rows are divided into splits and classes."""
