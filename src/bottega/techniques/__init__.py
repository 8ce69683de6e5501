"""One file, one technique."""
