"""The scheduler's end of the line takes every message that an agent may send."""

import typing

from msrun.cluster.scheduler import peers
from msrun.cluster.wire.messages import FromAgent


def test_a_message_of_every_kind_is_taken():
    assert set(peers._OF_AGENT) == set(typing.get_args(FromAgent))
