"""From option values to the JobSpec of a job, and to the plan that starts it."""
