"""Techniques that divide whole modules, beside the plans of single operators."""
