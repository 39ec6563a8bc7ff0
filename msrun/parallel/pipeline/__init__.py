"""Pipeline parallel: a model cut into stages that work on micro-batches one after the other.

`model.split_model` is the entry.  Importing this package imports no torch; `balance`, `chunks`
and `timeline` never do.
"""
