"""Rows that ranks keep: the cache, what servers know for it, and rows fetched ahead."""
