"""The agent: one process a node that starts, watches and stops its workers."""
