"""Divisions of whole models that no plan of single operators has: grids, and parts of images."""
