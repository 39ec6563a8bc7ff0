"""The command line: text from flags, environment and file becomes one JobSpec.

Start at `main`, which finds the verb in `verb_table`; `job/prepare` has the way from text to
plan in one page, and `options/catalog` the table from which flags, help and `plan` follow.
"""
