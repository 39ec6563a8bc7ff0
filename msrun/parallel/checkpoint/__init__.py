"""Checkpoints that any number of ranks in any layout can load."""
