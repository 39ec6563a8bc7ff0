"""The command line: text from flags, environment and file becomes one JobSpec.

Start at `main`, which finds the verb; `prepare` has the way from text to plan in one
page, and `options` the table that everything else is derived from.
"""
