"""What ranks that share sequences send, by all-to-alls and by a ring, and how long that takes."""

from __future__ import annotations

import pytest
from msgspec import structs

from msrun.parallel.search.cost.topology import preset
from msrun.parallel.search.graph.program import Program, Step, Value
from msrun.parallel.search.modules.attention import (
    ALL_TO_ALL,
    KINDS,
    RING,
    AttentionCall,
    attention_calls,
)
from msrun.parallel.search.modules.seconds import RoutedCall, of_experts

MIB = 2.0**20


def call(heads, key_heads, of_head, *, is_causal=False):
    return AttentionCall(heads, key_heads, of_head, is_causal)


def fastest(one, ranks):
    (wire,) = preset("a100").wires((ranks,))
    kinds = [kind for kind in KINDS if one.can(kind, ranks)]
    return min(kinds, key=lambda kind: one.seconds(kind, wire))


def test_heads_that_do_not_divide_leave_a_ring():
    assert not call(3, 3, MIB).can(ALL_TO_ALL, 2)
    assert fastest(call(3, 3, MIB), 2) == RING


def test_many_heads_of_keys_go_by_all_to_alls():
    for of_head in (MIB / 64, MIB):
        assert fastest(call(32, 32, of_head, is_causal=True), 4) == ALL_TO_ALL


def test_few_heads_of_keys_go_around_a_ring_once_their_bytes_outweigh_its_steps():
    kinds = [fastest(call(64, 1, of_head), 4) for of_head in (MIB / 1024, MIB)]
    assert kinds == [ALL_TO_ALL, RING]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(ranks):
    q = o = 8 * MIB
    k = v = 2 * MIB
    one = call(8, 2, MIB, is_causal=True)
    repeated = ranks // 2  # two heads of keys, for as many ranks
    forward = (ranks - 1) / ranks * (q + o + (k + v) * repeated)
    assert one.sent(ALL_TO_ALL, ranks) == 2 * forward
    around = (3 * ranks - 2) * (k + v)
    assert one.sent(RING, ranks) == around + 2 * (q + k + v + o)
    assert one._replace(is_causal=False).sent(RING, ranks) == around


def test_calls_of_attention_are_those_of_the_program():
    values = {
        "q": Value((2, 8, 64, 16)),
        "k": Value((2, 2, 64, 16)),
        "v": Value((2, 2, 64, 16)),
        "y": Value((2, 8, 64, 16)),
    }
    step = Step(
        name="y",
        target="aten.scaled_dot_product_attention.default",
        inputs={"query": "q", "key": "k", "value": "v"},
        outputs=("y",),
        attrs={"is_causal": True},
    )
    program = Program(
        values=values, params={}, inputs=("q", "k", "v"), steps=(step,), outputs=("y",)
    )
    assert [*attention_calls(program, 4)] == [call(8, 2, 2 * 64 * 16 * 4 / 4, is_causal=True)]


def routed(nbytes, flops=0.0, *, is_in_pieces=False, modules=1):
    """Return the exchange of a call on four ranks, without the time to start collectives."""
    topology = preset("a100")
    (wire,) = topology.wires((4,))
    calls = [RoutedCall(nbytes, flops, is_in_pieces=is_in_pieces)]
    return of_experts(calls, modules, structs.replace(wire, start=0.0, hop=0.0), topology)


def test_tokens_of_experts_travel_four_times_at_the_rate_of_the_links():
    (wire,) = preset("a100").wires((4,))
    more = routed(2 * MIB).seconds - routed(MIB).seconds
    assert more == pytest.approx(4 * MIB * 3 / 4 / wire.bandwidth)
    assert routed(MIB, 1e15).hidden == 0.0


def forward_of_two_pieces(way, computed):
    """Return the seconds until the results of two pieces are back, one event after the other."""
    link = device = 0.0
    arrived, done = [], []
    for _ in range(2):
        link += way / 2
        arrived.append(link)
    for at in arrived:
        device = max(device, at) + computed / 2
        done.append(device)
    for at in done:
        link = max(link, at) + way / 2
    return link


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 3.0])
def test_one_of_two_pieces_travels_beside_the_work_on_the_other(ratio):
    topology = preset("a100")
    way = routed(MIB).seconds / 4
    flops = ratio * way * topology.flops * topology.efficiency
    seconds, hidden = routed(MIB, flops, is_in_pieces=True)

    computed = ratio * way
    forward = forward_of_two_pieces(way, computed) - computed
    backward = forward_of_two_pieces(way, 2 * computed) - 2 * computed
    assert seconds == pytest.approx(forward + backward)
    assert seconds + hidden == pytest.approx(4 * way)


def test_each_piece_starts_collectives_of_its_own():
    topology = preset("a100")
    (wire,) = topology.wires((4,))
    start = wire.start + 3 * wire.hop / 2
    for is_in_pieces, number in ((False, 5), (True, 9)):
        calls = [RoutedCall(0.0, 0.0, is_in_pieces=is_in_pieces)]
        assert of_experts(calls, 3, wire, topology).seconds == pytest.approx(3 * number * start)
