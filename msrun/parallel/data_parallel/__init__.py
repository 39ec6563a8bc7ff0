"""Data parallelism: gradient reduction, ZeRO, sparse embedding gradients."""
