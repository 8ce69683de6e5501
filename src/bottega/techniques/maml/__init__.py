"""Meta-learning: MAML, first-order MAML and Reptile."""
