"""Leases, hang detection and stack dumps."""
