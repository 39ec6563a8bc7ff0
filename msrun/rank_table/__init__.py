"""Rank tables as files, and as lists of the nodes of a job."""
