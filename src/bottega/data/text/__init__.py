"""Text data: cleaning, filtering, deduplication, augmentation and tokenisation."""
