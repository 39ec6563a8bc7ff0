"""The cluster protocol, without IO.

Read `messages.py`, then `scheduler_state.py` and `agent_state.py`, then one
transcript in `tests/sim/scenarios`.
"""
