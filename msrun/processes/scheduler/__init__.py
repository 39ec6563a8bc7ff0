"""The scheduler process, and the handle of the agent that started it."""
