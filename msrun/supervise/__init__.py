"""Processes of one node: the reaper, the forkserver, and what holds them together.

Read `orders.py` first (what they say to each other), then `reaper.py` and `forkserver.py`.
"""
