"""Which mesh: pipeline stages, axes and micro-batches."""
