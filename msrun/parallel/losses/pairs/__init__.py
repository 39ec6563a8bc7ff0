"""Pairs of rows of two inputs of a batch, which micro-batches have a part of."""
