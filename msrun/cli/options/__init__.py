"""The table of options, and how flags, variables and job files become their values."""
