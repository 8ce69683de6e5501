"""The torch engine. Only `bottega.engines` imports it; other packages open it with `bottega.engines.backend`."""
