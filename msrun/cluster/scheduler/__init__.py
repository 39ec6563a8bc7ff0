"""The scheduler's state machine and everything it decides with."""
