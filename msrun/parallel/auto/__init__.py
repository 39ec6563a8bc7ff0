"""Automatic strategy search: which placement of every tensor makes a training step fastest."""
