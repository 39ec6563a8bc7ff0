"""Values and structures of tensors that ranks send each other, without pickle."""
