"""The one event that both state machines share: time."""

import msgspec


class Tick(msgspec.Struct, frozen=True):
    """Time passed and nothing else happened."""
