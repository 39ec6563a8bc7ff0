"""Options: what exists, and how flags, variables and job files become values."""
