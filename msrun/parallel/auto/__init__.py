"""Mode `auto` with torch: trace a model, search a plan (`parallel.search`), execute it."""
