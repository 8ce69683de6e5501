"""Token losses, plain and fused with the output layer."""
