"""Layers that need care under data parallelism, and recomputation."""
