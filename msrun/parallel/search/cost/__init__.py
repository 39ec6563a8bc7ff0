"""The cluster, and what collectives and redistribution cost on it."""
