"""Tables that no rank has memory for: servers make them, and checkpoints stream them."""
