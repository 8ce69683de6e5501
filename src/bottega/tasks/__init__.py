"""Tasks: one folder each, with its model's task, its data and what only it can do; what they share lies beside them."""
