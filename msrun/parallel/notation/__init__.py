"""Notations of sharded tensors: axis names, MindSpore strategies and layouts."""
