"""Models that others have trained and that stay as they are: language models, image generators, captioners."""
