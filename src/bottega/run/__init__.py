"""The composition root: from a recipe to a finished run, and back from its directory."""
