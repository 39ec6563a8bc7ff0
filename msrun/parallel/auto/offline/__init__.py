"""The search of `msrun search`: a model without a job, its samples, and who asks."""
