"""Functions of tensors that ranks share by sample, in fewer calls than DTensor needs."""
