"""The order of samples: shuffles, mixtures, curricula, sequences of sources, online streams and episodes."""
