"""The schema of recipes: closed, and checkable without torch."""
