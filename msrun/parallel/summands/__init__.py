"""Gradients of which each rank of a plan has a summand, added up together at the end of a step."""
