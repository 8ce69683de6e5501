"""The decoder of language models, and its layouts in transformers."""
