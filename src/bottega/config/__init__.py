"""What a recipe may say: one closed schema, checkable without torch."""
