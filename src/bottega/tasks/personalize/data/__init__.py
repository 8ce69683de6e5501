"""Records of people: read, checked, divided by person, and prepared with their pictures."""
