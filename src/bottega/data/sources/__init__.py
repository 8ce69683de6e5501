"""Sources: sets of samples fetched by index, and their combinations."""
