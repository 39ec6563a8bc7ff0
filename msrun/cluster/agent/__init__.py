"""The agent's state machine."""
