"""The parallel runtime inside a rank: one mapping configures everything.

Importing this package imports no torch; `config`, `layout` and `plan` never do.
"""
