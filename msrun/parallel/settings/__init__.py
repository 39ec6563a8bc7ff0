"""Sections of the parallel configuration that stand alone, and what all sections have."""
