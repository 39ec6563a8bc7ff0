"""Host names: lists, hostfiles, and the allocations of batch systems."""
