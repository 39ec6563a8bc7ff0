"""The cluster protocol, without IO.

Read `wire/messages.py`, then `scheduler/state.py` and `agent/state.py`, then one
transcript in `tests/sim/scenarios`.
"""
