"""Host names: lists, hostfiles, and what batch systems allot."""
