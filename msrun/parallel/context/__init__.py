"""Context parallelism: every rank of the axis `cp` has a part of each sequence."""
