"""A network that routes each sample to a few of its experts."""
