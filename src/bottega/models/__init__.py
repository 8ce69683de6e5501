"""Plain torch modules, built from a shape; they know nothing of recipes, tasks and training."""
