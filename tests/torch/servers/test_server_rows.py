"""The rows of one server: slices in and out, and steps of some of them."""

import pytest
import torch
from torch import nn

from msrun.cluster.servers.events import Rules
from msrun.cluster.servers.messages import Snapshot
from msrun.parallel.servers.disk import ServerDisk
from msrun.parallel.servers.recipe import Recipe, recipe_of
from msrun.parallel.servers.routing import gradients_of, split_gradients
from msrun.parallel.servers.rows import RowGradients, ServerRows, WorkerPush, cut, join
from msrun.parallel.servers.wire import SessionPlan

pytestmark = pytest.mark.torch


def server(weight, optimizer, count=3):
    rows = ServerRows({"t": count}, recipe_of(optimizer, {weight: "t"}))
    rows.replace(cut(weight, "t", count))
    return rows


def push(ids, values, **more):
    gradients = RowGradients(ids=torch.tensor(ids), values=torch.tensor(values), **more)
    return WorkerPush(gradients={"t": gradients})


@pytest.mark.parametrize("shape", [(7, 2), (3,), (8, 2, 2)])
def test_slices_make_the_weight_again(shape):
    weight = torch.randn(shape)

    assert torch.equal(join(cut(weight, "t", 3), "t", 3), weight)


def test_a_scalar_is_a_row():
    weight = torch.tensor(3.5)

    assert join(cut(weight, "t", 1), "t", 1).tolist() == [3.5]


def test_rows_are_read_in_the_order_in_which_they_are_asked_for():
    weight = nn.Parameter(torch.arange(14.0).reshape(7, 2))
    rows = server(weight, torch.optim.SGD([weight], lr=1.0))
    ids = torch.tensor([6, 0, 5, 3])

    assert torch.equal(rows.read("t", ids), weight.detach()[ids])


def test_gradients_of_workers_are_added():
    weight = nn.Parameter(torch.zeros(7, 1))
    rows = server(weight, torch.optim.SGD([weight], lr=1.0))

    rows.apply([push([1, 2], [[1.0], [2.0]]), push([2, 6], [[4.0], [8.0]])])

    assert join(rows.contents(), "t", 3).flatten().tolist() == [0, -1, -6, 0, 0, 0, -8]


def test_a_table_that_nobody_used_is_not_stepped():
    """In one process its gradient would be None, so that not even momentum moves it."""
    weight = nn.Parameter(torch.zeros(7, 1))
    rows = server(weight, torch.optim.SGD([weight], lr=1.0, momentum=0.5))
    rows.apply([push([1], [[1.0]])])
    before = join(rows.contents(), "t", 3)

    rows.apply([WorkerPush(gradients={})])

    assert torch.equal(join(rows.contents(), "t", 3), before)


def test_optimizer_state_moves_with_its_slice():
    weight = nn.Parameter(torch.zeros(7, 1))
    one = server(weight, torch.optim.AdamW([weight], lr=0.1))
    one.apply([push([0, 4], [[1.0], [-2.0]])])
    other = server(weight, torch.optim.AdamW([weight], lr=0.1))
    other.replace(one.contents())

    for rows in (one, other):
        rows.apply([push([4, 5], [[1.0], [3.0]])])

    assert torch.equal(join(one.contents(), "t", 3), join(other.contents(), "t", 3))


def test_contents_are_copies():
    weight = nn.Parameter(torch.zeros(7, 1))
    rows = server(weight, torch.optim.SGD([weight], lr=1.0))
    snapshot = rows.contents()

    rows.apply([push([1], [[1.0]])])

    assert not join(snapshot, "t", 3).any()


def test_memory_is_that_of_the_table_and_its_optimizer_state():
    weight = nn.Parameter(torch.zeros(6_000, 16))
    rows = server(weight, torch.optim.AdamW([weight], lr=0.1))
    rows.apply([push([1], [[1.0] * 16])])

    assert rows.nbytes == pytest.approx(weight.nbytes * 3, rel=0.01)


def test_gradients_go_to_the_owners_of_their_rows():
    gradients = RowGradients(ids=torch.tensor([5, 2, 4]), values=torch.tensor([[5.0], [2], [4]]))

    parts = split_gradients(gradients, [0, 1])

    assert parts[0].ids.tolist() == [2, 4]
    assert parts[1].values.tolist() == [[5.0]]


def test_a_sparse_gradient_stays_one_and_counts_duplicates_once():
    embedding = nn.Embedding(9, 2, sparse=True)
    embedding(torch.tensor([3, 3, 7])).sum().backward()

    gradients = gradients_of(embedding.weight, torch.tensor([3, 7]))

    assert gradients.is_sparse
    assert gradients.ids.tolist() == [3, 7]
    assert gradients.values.tolist() == [[2, 2], [1, 1]]


def test_a_snapshot_that_a_kill_left_unfinished_is_none(tmp_path):
    plan = SessionPlan(
        session="0-0-s",
        tables=[],
        recipe=Recipe(kind="SGD", options={}),
        rules=Rules(),
        workers=1,
        suppliers={},
    )
    disk = ServerDisk(tmp_path / "server-0")
    disk.write_plan(plan)
    first, second = (Snapshot(epoch=1, version=n, clocks={0: n}, done={}) for n in (3, 6))
    slices = cut(torch.randn(6, 4), "t", 2)
    disk.save(first, slices)
    half = (tmp_path / "server-0" / "snapshots" / "1-3").read_bytes()[:100]
    (tmp_path / "server-0" / "snapshots" / "1-6.new").write_bytes(half)

    again = ServerDisk(tmp_path / "server-0")

    assert again.snapshots() == [first]
    for piece, at_rest in again.load(1, 3).items():
        assert torch.equal(at_rest.rows, slices[piece].rows)
    again.save(second, slices)
    assert again.snapshots() == [first, second]
