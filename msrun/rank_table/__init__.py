"""Rank tables as files, and as nodes of a job."""
