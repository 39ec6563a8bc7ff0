"""Ranks that wait for each other for good: found while they wait, and named."""
