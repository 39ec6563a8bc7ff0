"""Models built without memory and materialised shard by shard."""
