"""Networks that recall facts from their input: over segments of a stream, or across steps."""
