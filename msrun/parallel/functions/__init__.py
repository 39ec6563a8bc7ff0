"""Functions whose tensors ranks share: `msrun.shard`."""
