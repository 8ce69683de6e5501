"""Preparing, once: whatever a recipe's data is becomes tables in our shards, under the hash of all they are made from."""
