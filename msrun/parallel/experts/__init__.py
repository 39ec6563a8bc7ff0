"""Experts of a mixture on the ranks of an axis: tokens travel to them and back."""
