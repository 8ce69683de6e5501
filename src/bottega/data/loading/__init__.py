"""The data loader, its worker processes and the transfer of batches."""
