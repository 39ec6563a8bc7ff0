"""Parts of a model that stay in the memory of the host, beside a device that computes the rest."""
