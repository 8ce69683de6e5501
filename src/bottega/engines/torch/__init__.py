"""The torch engine and what it is made of. Nobody outside `bottega.engines` imports it: `bottega.engines.backend` opens it."""
