"""What ranks compare of a loop that computes losses and differentiates them by itself."""
