"""The search of `msrun search`, for a model without a job."""
