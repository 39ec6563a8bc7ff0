"""The version of msrun, in a module of its own so that every package may name it."""

__version__ = "0.1.0"
