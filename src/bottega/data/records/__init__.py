"""One record of a person's data: its fields, and what may come out of a packed file."""
