"""Classification of number rows by a mixture of experts."""
