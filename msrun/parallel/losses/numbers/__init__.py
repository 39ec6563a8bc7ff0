"""Functions of torch that make one number, or a sum over samples, of tensors of samples."""
