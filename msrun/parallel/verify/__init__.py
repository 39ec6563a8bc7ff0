"""`verify`: the first steps run also as one process runs them, and must give the same."""
