"""torch's functions over lists of tensors, called by scripts on plain and sharded ones together."""
