"""Processes of one node: the reaper, the forkserver, their orders and their containment.

Read `orders.py` first (their messages), then `reaper.py` and `forkserver.py`.
"""
