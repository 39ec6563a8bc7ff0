"""Strategy search without torch: which placement of every tensor is fastest."""
