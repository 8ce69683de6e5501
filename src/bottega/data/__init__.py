"""From files to batches: formats, preparation, sources, sample order, loading, tokenizers. Imports neither torch nor jax."""
