"""Records of users: read, checked, split by user, and prepared with their images."""
