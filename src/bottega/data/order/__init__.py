"""Which sample stands where: shuffles, mixtures, curricula, sequences, streams and episodes."""
