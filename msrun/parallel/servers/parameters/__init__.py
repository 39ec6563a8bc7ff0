"""Which parameters live on servers, and what a rank knows of each."""
