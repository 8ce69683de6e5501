"""Prepared data on disk: column shards, the cache that holds them, splits and classes."""
