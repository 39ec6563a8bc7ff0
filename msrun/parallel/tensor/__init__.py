"""Operator-level (tensor) parallelism."""
