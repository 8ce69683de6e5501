"""Preparation: turn a recipe's data into tables on disk, once, cached under the hash of all inputs."""
