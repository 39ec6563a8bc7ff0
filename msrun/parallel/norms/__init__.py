"""Normalization by statistics of samples that several ranks have."""
