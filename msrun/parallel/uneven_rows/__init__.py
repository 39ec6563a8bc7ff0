"""Embedding tables whose rows ranks divide unevenly, each for fields of its own."""
