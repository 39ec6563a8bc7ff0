"""Code inside a rank, before and beside the user's program.

Read `bootstrap.py` first: the steps from a bare fork to the program's first line.
"""
