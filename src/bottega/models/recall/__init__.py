"""Networks that recall what they were told: over segments of a stream, or across steps."""
