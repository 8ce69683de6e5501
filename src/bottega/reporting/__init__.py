"""The HTML report: one page over runs, cross-validations and studies, built from their files alone."""
