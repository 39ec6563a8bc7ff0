"""Plans as they are saved, explained, and lowered to the runtime."""
