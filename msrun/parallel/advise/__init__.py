"""Which parallel technique a model needs: what each costs and saves, and the first that fits."""
