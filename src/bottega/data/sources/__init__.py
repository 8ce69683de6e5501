"""Sets of samples that can be fetched by number, and how several become one."""
