"""Records: one row of the user's data, its fields, and the safe decoding of archive members."""
