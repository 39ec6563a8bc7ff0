"""From option values to a JobSpec and the plan that starts it."""
