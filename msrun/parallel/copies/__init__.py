"""Multiple copies: slices of a batch whose forwards take turns at each collective."""
