"""Plain torch modules. They know their shape from the schema and nothing else of ours."""
