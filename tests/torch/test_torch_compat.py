"""The private names of torch still mean what we use them for."""
# tidy: long file, the tests of all private names of torch are in one place

import copy
import functools
import inspect
import itertools
import math
import multiprocessing
import pickle
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ranks import Counted, batches, build, run_ranks, run_warm
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from msrun.errors import ConfigError
from msrun.parallel import torch_compat
from msrun.parallel.losses.sample_watch import SampleWatch
from msrun.parallel.losses.watch import LossWatch
from msrun.parallel.torch_compat import (
    GENERATED,
    ShardSpecs,
    active_modes,
    add_mode_below,
    after_backward,
    as_plain_tensors,
    as_replicated,
    before_gathers,
    begin_units,
    breaks_graph,
    call_of,
    calls_replaced,
    checkpointed,
    compiled_again,
    compiled_whole,
    dispatching,
    draws_by_values,
    drop_gathered_gradients,
    eagerly,
    empty_wrapper,
    following,
    forget_hook,
    functional_collective,
    gathered_with_gradient,
    gradient_hook_numbers,
    gradient_hooks,
    has_global_hooks,
    has_gradient_hooks,
    has_own_call,
    has_raised_pass,
    has_shards_in_place,
    hooks_of,
    is_active,
    is_compiled,
    is_compiled_in_place,
    is_dispatching,
    is_first_of_step_hooks,
    is_gathered,
    is_graph_read,
    is_higher_order,
    is_in_backward,
    is_of_compiler,
    is_of_reader,
    is_of_sharded_write,
    is_pointwise,
    is_step_of_scheduler,
    is_tracing,
    is_transforming,
    join_axes,
    joined,
    keeps_graph,
    keeps_off_compiler,
    local_tensor,
    lost_base,
    mapped,
    modes,
    move_shards_by_all_to_all,
    never_compile,
    note_step,
    notes_of_forward,
    of_subclass,
    off_compiler,
    open_inputs,
    ordered_group,
    parameters_replaced,
    parts_before,
    parts_with_parameters,
    passes_straight,
    reduce_sharded,
    registered_hooks,
    remove_mode,
    replace_element_methods,
    replace_list_functions,
    replace_refused,
    replace_tensors,
    replaced_parameter,
    shards_of_gathered,
    share_attributes,
    share_gradient_hooks,
    show_shards,
    strided_shard,
    takes_device,
    tensors_in,
    transforming_whole,
    unreduced_gradients,
    unseen_by,
    viewed,
    watch_joined_inputs,
    watch_sharded_values,
    watch_units,
    without_dispatch_in_branches,
    without_forward_hooks,
    without_mode,
    without_stack_traces,
    write_count,
    written_arguments,
)

pytestmark = pytest.mark.torch


def test_after_backward_comes_behind_every_gradient_on_the_same_thread():
    first, last = (torch.ones((), requires_grad=True) for _ in range(2))
    seen = []

    def note():
        seen.append((first.grad is not None, last.grad is not None, threading.get_ident()))

    # The gradient of `last` is there first, long before that of `first`.
    last.register_post_accumulate_grad_hook(lambda _: after_backward(note))
    (first.exp().exp() + last).backward()

    assert seen == [(True, True, threading.get_ident())]


def test_programs_of_graphs_say_that_they_are_generated():
    program = torch.fx.symbolic_trace(nn.ReLU()).forward
    assert program.__code__.co_filename.startswith(GENERATED)


def test_each_backward_has_a_number_of_its_own():
    found = [torch_compat.backward_number()]
    for _ in range(2):
        weight = torch.ones(1, requires_grad=True)
        weight.register_hook(lambda _: found.append(torch_compat.backward_number()))
        (weight * 2).backward()

    assert found[0] == -1
    assert len({*found}) == len(found)


def test_after_backward_counts_for_one_backward():
    x = torch.ones((), requires_grad=True)
    seen = []
    hook = x.register_post_accumulate_grad_hook(lambda _: after_backward(lambda: seen.append(1)))
    (2 * x).backward()
    hook.remove()
    (2 * x).backward()

    assert seen == [1]
    with pytest.raises(RuntimeError):
        after_backward(seen.clear)


def test_leaves_of_containers_are_replaced():
    tree = {"a": [1, (2, None)]}

    assert mapped(lambda leaf: 3 if leaf == 2 else leaf, tree) == {"a": [1, (3, None)]}
    assert mapped(lambda leaf: leaf, tree) is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # jvp of torch loads it
def test_transforms_of_functions_are_seen_and_get_other_arguments():
    inside = []

    def double(x):
        inside.append(is_transforming())
        return (x * 2).sum()

    def whole(value):
        return value + 1 if isinstance(value, torch.Tensor) else value

    x = torch.ones(2)
    transforms = (
        lambda: torch.vmap(double)(x[None])[0],
        lambda: torch.func.grad_and_value(double)(x)[1],
        lambda: torch.func.grad(lambda y: double(y) ** 2)(x).sum() / 8,
        lambda: torch.func.vjp(double, x)[0],
        lambda: torch.func.jvp(double, (x,), (x,))[0],
    )
    before = [call().item() for call in transforms]
    with transforming_whole(whole):
        during = [call().item() for call in transforms]

    assert not is_transforming()
    assert all(inside)
    assert before == [4.0] * 5
    assert during == [8.0] * 5
    assert [call().item() for call in transforms] == before


def test_functions_take_subclasses_as_plain_tensors_inside():
    class Refusing(nn.Parameter):
        @classmethod
        def __torch_function__(cls, *_):
            raise TypeError("refused")

    x = Refusing(torch.ones(2))
    with pytest.raises(TypeError):
        torch.add(x, x)
    with as_plain_tensors():
        y = x + x

    assert type(y) is torch.Tensor


def test_a_mode_is_active_inside_it_and_not_in_a_backward():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    mode, other = Mode(), Mode()
    x = torch.ones((), requires_grad=True)
    seen = []
    x.register_post_accumulate_grad_hook(lambda _: seen.append(is_active(mode)))

    assert not is_active(mode)
    with mode:
        assert (is_active(mode), is_active(other)) == (True, False)
        with other:
            assert (is_active(mode), is_active(other)) == (True, True)
            assert active_modes()[-2:] == [mode, other]
            y = 2 * x
        threading.Thread(target=lambda: seen.append(is_active(mode))).start()
    y.backward()
    assert not is_active(mode)
    assert seen == [False, False]


def _strided():
    mesh = init_device_mesh("cpu", (2, 2))
    placed = (strided_shard(0, 2), Shard(0))
    tensor = distribute_tensor(torch.arange(8), mesh, placed, src_data_rank=None)
    return tensor.to_local().tolist(), tensor.full_tensor().tolist()


def test_a_mode_entered_in_a_node_of_a_backward_ends_with_it():
    mode, seen = TorchFunctionMode(), []

    def enter(_):
        seen.append(is_in_backward())
        mode.__enter__()
        seen.append(is_active(mode))

    x = torch.ones((), requires_grad=True)
    between = x * 2
    between.register_hook(enter)
    x.register_post_accumulate_grad_hook(lambda _: seen.append(is_active(mode)))
    between.exp().backward()

    assert seen == [True, True, False]
    assert (is_in_backward(), is_active(mode)) == (False, False)


def test_is_pointwise():
    names = [
        "sinh",
        "addcmul",
        "erfcx",
        "cumsum",
        "softmax",
        "__eq__",
        "forward",
        "name",
        "",
        "a.b",
    ]
    assert [name for name in names if is_pointwise(name)] == ["sinh", "addcmul", "erfcx"]


def test_is_dispatching():
    assert not is_dispatching()
    with Counted():
        assert is_dispatching()
        assert is_tracing()
    with dispatching(lambda func, _, args, kwargs: func(*args, **kwargs)):
        assert is_dispatching()
        assert not is_tracing()
        with Counted():
            assert is_tracing()
    assert not is_dispatching()


def test_a_strided_shard_cuts_after_later_axes():
    whole = list(range(8))

    assert run_ranks(_strided, 4) == [
        ([0, 1], whole),
        ([4, 5], whole),
        ([2, 3], whole),
        ([6, 7], whole),
    ]


def test_parts_before():
    assert parts_before(strided_shard(1, 4)) == 4
    assert parts_before(Shard(1)) == 1
    assert parts_before(Replicate()) is None
    assert parts_before(Partial()) is None


def _reduced_over_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    join_axes(mesh)
    join_axes(mesh)
    part = DTensor.from_local(torch.ones(2), mesh, (Partial(), Partial()))
    with Counted() as counted:
        whole = part.full_tensor()
    one = joined(mesh, "all")
    assert (one.mesh_dim_names, one.size(), one.get_local_rank()) == (("all",), 4, dist.get_rank())
    return dict(counted.calls), whole.tolist()


def test_joined_axes_are_one_to_collectives():
    assert run_ranks(_reduced_over_two_axes, 4) == 4 * [({"all_reduce": 1}, [4.0, 4.0])]


def _gathered_in_order():
    """Return ranks as each axis of a mesh and both together gather them, and a sharded tensor."""
    groups = [ordered_group(ranks, "x") for ranks in ([[3, 2], [1, 0]], [[3, 1], [2, 0]])]
    mesh = DeviceMesh.from_group(groups, "cpu", [[3, 1], [2, 0]], mesh_dim_names=("y", "x"))
    one = joined(mesh, "all")
    assert joined(mesh["y", "x"], "all") is one
    found = []
    for each in (mesh["y"], mesh["x"], one):
        said = [None] * each.size()
        dist.all_gather_object(said, dist.get_rank(), group=each.get_group())
        assert said[each.get_local_rank()] == dist.get_rank()
        found.append(said)
    part = torch.tensor([float([3, 1, 2, 0].index(dist.get_rank()))])
    placed = DTensor.from_local(part, mesh, (Shard(0), Shard(0)))
    with Counted() as counted:
        total = placed.redistribute(placements=(Replicate(), Replicate())).to_local()
        sums = DTensor.from_local(part, mesh, (Partial(), Partial())).full_tensor()
    return found, total.tolist(), sums.tolist(), dict(counted.calls)


def _written_by_shards():
    """Return whether what torch asserts of a plain number that a sharded one writes is known."""
    mesh = init_device_mesh("cpu", (2,))
    try:
        torch.tensor(0.0).copy_(DTensor.from_local(torch.ones(1), mesh, (Shard(0),)).amax())
    except AssertionError as error:
        return is_of_sharded_write(error), is_of_sharded_write(AssertionError())
    return None


def test_a_write_of_a_sharded_number_is_known():
    assert run_ranks(_written_by_shards, 2) == [(True, False)] * 2


def test_groups_and_joined_axes_keep_the_order_of_a_mesh():
    of_y, of_x = {3: [3, 2], 1: [1, 0]}, {3: [3, 1], 2: [2, 0]}
    expected = [
        ([of_y[y], of_x[x], [3, 1, 2, 0]], [0.0, 1.0, 2.0, 3.0], [6.0])
        for y, x in ((1, 2), (1, 3), (3, 2), (3, 3))
    ]
    found = run_ranks(_gathered_in_order, 4)

    assert [of_rank[:3] for of_rank in found] == expected
    # The sum is one collective for both axes.
    assert {of_rank[3]["all_reduce"] for of_rank in found} == {1}


def test_a_torch_that_sorts_the_ranks_of_groups_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, group_desc=None: (ranks, group_desc))

    with pytest.raises(ConfigError, match="makes groups of sorted ranks alone"):
        ordered_group([[1, 0]], "x")


def _specs():
    """Return what torch and `ShardSpecs` know of parts, and whether a copy is each tensor's own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    specs, found = ShardSpecs(), []
    for placed, part in [((Shard(1),), torch.ones(2, 3).t()), ((Replicate(),), torch.ones(4))]:
        theirs = DTensor.from_local(part, mesh, placed, run_check=False)
        ours = [specs.tensor(part, mesh, placed) for _ in range(2)]
        found += [each._spec == theirs._spec for each in ours]
        found.append(ours[0]._spec is not ours[1]._spec)
        found.append(local_tensor(ours[0]).data_ptr() == part.data_ptr())
    partial = specs.tensor(torch.ones(2), mesh, (Partial(),), (torch.Size([3]), (Shard(0),)))
    again = specs.tensor(torch.ones(2), mesh, (Shard(0),), (torch.Size([3]), (Shard(0),)))
    found += [partial.shape == again.shape == (3,), partial.placements == (Partial(),)]
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    return [*found, specs.tensor(torch.ones(4), other, (Replicate(),)).device_mesh is other]


def test_specs_of_shards_are_those_of_torch():
    assert run_ranks(_specs, 2) == 2 * [11 * [True]]


class Seen(TorchFunctionMode):
    """Counts functions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_tells_that_it_reads_the_graph():
    x = torch.ones(4, 3, requires_grad=True)
    assert not is_graph_read()
    with LossWatch(4, [x]):
        assert not is_graph_read()
        with SampleWatch([x], 4):
            assert is_graph_read()
    assert not is_graph_read()


def test_functions_are_unseen_by_a_mode_that_is_alone():
    one, other = Seen(), Seen()
    with one, unseen_by(one):
        torch.ones(1).add(1)
    assert one.count == 0
    with other, one, unseen_by(one):
        torch.ones(1).add(1)
    assert one.count == other.count > 0


def test_one_mode_of_several_is_left():
    one, other = Seen(), Seen()
    with one, other:
        with without_mode(one):
            torch.ones(1).add(1)
        assert one.count == 0 < other.count
        torch.ones(1).add(1)
    assert one.count > 0
    with without_mode(one):  # that is not on
        torch.ones(1).add(1)


def test_a_mode_below_others_outlives_them():
    one, other = Seen(), Seen()
    torch.set_default_device("cpu")
    try:
        with torch.device("cpu"), other:
            add_mode_below(one)
            torch.ones(1).add(1)
        assert one.count == other.count > 0
        torch.ones(1).add(1)
        assert one.count > other.count
    finally:
        torch.set_default_device(None)  # fails if its mode is not the last one
        assert modes()[0] == [one]
        remove_mode(one)
    remove_mode(one)  # that is not on
    assert modes()[0] == []


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
def test_a_function_is_compiled_to_one_graph_that_is_looked_at():
    seen = []

    def both(x):
        return functional.gelu(x) + torch.arange(3)

    run = compiled_whole(both, "default", seen.append)
    x = torch.randn(3)
    torch.testing.assert_close(run(x), both(x))
    (graph,) = seen
    assert torch.arange in [node.target for node in graph.graph.nodes]

    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(RuntimeError) as caught:
        compiled_whole(broken, "default", seen.append)(x)
    assert breaks_graph(caught.value)
    assert not breaks_graph(ValueError())
    assert is_of_reader(caught.value)
    assert not is_of_reader(ValueError())
    assert is_of_compiler(torch._dynamo.exc.FailOnRecompileLimitHit())

    def refuse(_):
        raise ValueError("no such graph")

    with pytest.raises(RuntimeError, match="no such graph") as caught:
        compiled_whole(both, "default", refuse)(x)
    assert not is_of_reader(caught.value)


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
def test_what_a_compiled_graph_returns_is_changed_by_who_looked_at_it():
    def look(_):
        return lambda results: [result + 1 for result in results]

    x = torch.randn(3)
    torch.testing.assert_close(compiled_whole(torch.sin, "default", look)(x), x.sin() + 1)


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
def test_what_is_never_compiled_is_read_inside_of_following():
    net, x = torch.nn.Linear(2, 2), torch.randn(3, 2)
    never_compile(net, "a test")
    graphs = []
    run = compiled_whole(lambda x: net(x).sin(), "default", graphs.append)
    with pytest.raises(RuntimeError) as caught:
        run(x)
    assert is_of_reader(caught.value)
    with following():
        torch.testing.assert_close(run(x), net(x).sin())
    assert len(graphs) == 1


def _functional():
    """Run every functional collective in a group that is not the first ranks."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    if dist.get_rank() == 0:
        return None
    group, rank = groups[1], groups[1].rank()
    x = torch.tensor([1.0 + rank, 10.0])
    other = [0, 2] if rank == 0 else [2, 0]
    found = {
        "sum": functional_collective("all_reduce", x, "sum", group=group),
        "max": functional_collective("all_reduce", x, "max", group=group),
        "gather": functional_collective("all_gather_into_tensor", x, 2, group=group),
        "scatter": functional_collective("reduce_scatter_tensor", x, "sum", 2, group=group),
        "broadcast": functional_collective("broadcast", x, 1, group=group),
        "exchange": functional_collective("all_to_all_single", x, [1, 1], [1, 1], group=group),
        "swap": functional_collective("all_to_all_single", x, other, other, group=group),
    }
    assert x.tolist() == [1.0 + rank, 10.0]
    return {name: value.tolist() for name, value in found.items()}


def test_functional_collectives():
    alike = {"sum": [3, 20], "max": [2, 10], "gather": [1, 10, 2, 10], "broadcast": [2, 10]}

    assert run_ranks(_functional, 3) == [
        None,
        alike | {"scatter": [3], "exchange": [1, 2], "swap": [2, 10]},
        alike | {"scatter": [20], "exchange": [10, 10], "swap": [1, 10]},
    ]


def _moved(shape):
    """Return where shards and gradients differ after a move to each other dim, and collectives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    move_shards_by_all_to_all()
    move_shards_by_all_to_all()  # once is enough
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    wrong, calls, sent = [], Counter(), 0
    for before, after in itertools.permutations(range(len(shape)), 2):
        x = distribute_tensor(whole, mesh, [Shard(before)], src_data_rank=None).requires_grad_()
        with Counted() as counts:
            y = x.redistribute(placements=[Shard(after)])
            (y.to_local().sum() * (1 + dist.get_rank())).backward()
        expected = distribute_tensor(whole, mesh, [Shard(after)], src_data_rank=None)
        ones = torch.ones_like(expected.to_local()) * (1 + dist.get_rank())
        slopes = DTensor.from_local(ones, mesh, [Shard(after)], shape=shape, stride=whole.stride())
        back = slopes.full_tensor()
        if not torch.equal(y.to_local(), expected.to_local()):
            wrong.append((before, after, "value"))
        if not torch.equal(x.grad.full_tensor(), back):
            wrong.append((before, after, "gradient"))
        calls += counts.calls
        sent += counts.bytes["all_to_all_single"]
    return wrong, dict(calls), sent


def test_shards_move_to_another_dim_by_all_to_all():
    shape = (4, 8, 2)
    for wrong, calls, sent in run_ranks(_moved, 2, shape):
        assert wrong == []
        # Six moves there and back, each of one shard.
        assert calls == {"all_to_all_single": 12}
        assert sent == 12 * math.prod(shape) // 2 * 4
    for wrong, calls, _ in run_ranks(_moved, 2, (3, 5, 7)):  # shards are padded
        assert (wrong, calls) == ([], {"all_to_all_single": 12})


def _accumulated():
    """Return gradients of two micro-batches on two ranks, and those of one process."""
    sharded, plain = build("mlp"), build("mlp")
    for module in (*sharded.children(), sharded):
        fully_shard(module, reshard_after_forward=False)
    sharded.set_requires_gradient_sync(False)
    x, y = batches("mlp", steps=1)[0]
    functional.cross_entropy(plain(x), y).backward()
    mine = slice(dist.get_rank(), None, 2)
    for part, target in zip(x.chunk(4)[mine], y.chunk(4)[mine], strict=True):
        functional.cross_entropy(sharded(part), target).backward()
    reduce_sharded(sharded)
    whole = [param.grad.full_tensor() for param in sharded.parameters()]
    return all(
        torch.allclose(found / 2, param.grad, atol=1e-7)
        for found, param in zip(whole, plain.parameters(), strict=True)
    )


def test_gradients_that_added_up_in_a_sharded_model_are_reduced():
    assert run_ranks(_accumulated, 2) == [True, True]


def _told():
    """Return what a model gathers and reduces in a step, where the bias of fc2 is not trained."""
    model, told = build("mlp"), []
    for module in (*model.children(), model):
        fully_shard(module)
    watch_units(model, lambda name: told.append(f"+{name}"), told.append, told.append, told.append)
    model.fc2.bias.requires_grad_(requires_grad=False)
    x, y = batches("mlp", steps=1)[0]
    functional.cross_entropy(model(x), y).backward()
    return told


def _after_a_raised_pass():
    """Return what is known of a pass that raises, and gradients of the next one and of another."""
    models = [build("mlp") for _ in range(2)]
    found = []
    for index, model in enumerate(models):
        before = []
        for module in (*model.children(), model):
            fully_shard(module)
        watch_units(model, *4 * [lambda *_: None], gathering=before.append)
        x, y = batches("mlp", steps=1)[0]
        if index:
            broken = model.fc1.register_full_backward_pre_hook(_raise)
            with pytest.raises(ArithmeticError):
                functional.cross_entropy(model(x), y).backward()
            found += [has_raised_pass(model), any(p.grad is not None for p in model.parameters())]
            drop_gathered_gradients(model)
            model.reset_iter_state()
            model.zero_grad()
            broken.remove()
        found.append(has_raised_pass(model))
        before.clear()
        functional.cross_entropy(model(x), y).backward()
        found.append(len(before))
    pairs = zip(*(model.parameters() for model in models), strict=True)
    same = [torch.equal(one.grad.to_local(), other.grad.to_local()) for one, other in pairs]
    return found, all(same)


def _raise(*_):
    raise ArithmeticError


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="this version of torch cannot forget a pass",
)
def test_a_pass_of_units_that_raised_is_known_and_forgotten():
    for found, is_same in run_ranks(_after_a_raised_pass, 2):
        assert (found[0], found[2:4], found[4]) == (False, [True, True], False)
        assert found[1] == found[5]
        assert is_same


def test_watched_units_tell_what_is_gathered_and_reduced():
    forward = ["+fc1", "+fc2", "+fc3"]
    # What comes next is gathered before its turn.
    backward = ["+fc3", "+fc2", ["fc3.weight", "fc3.bias"], "+fc1", ["fc2.weight"]]

    assert run_ranks(_told, 2) == 2 * [[*forward, *backward, ["fc1.weight", "fc1.bias"]]]


def _gathered():
    model, told = build("mlp"), []
    for module in (*model.children(), model):
        fully_shard(module)
    shards = {id(param): name for name, param in model.named_parameters()}
    before_gathers(model, lambda params: told.append([shards[id(param)] for param in params]))
    model(batches("mlp", steps=1)[0][0])
    return told


def test_gathers_are_told_of_with_the_shards_that_they_are_of():
    of_units = [[f"fc{n}.weight", f"fc{n}.bias"] for n in (1, 2, 3)]
    assert run_warm(_gathered, 2) == 2 * [of_units]


def test_a_hook_is_put_before_all_others_of_a_step():
    weight, seen = torch.ones(1, requires_grad=True), []
    update = torch.optim.SGD([weight])
    first = update.register_step_post_hook(lambda *_: seen.append("first"))
    assert not is_first_of_step_hooks(update, first)
    second = update.register_step_post_hook(lambda *_: seen.append("second"))
    assert is_first_of_step_hooks(update, second)
    update.step()
    assert seen == ["second", "first"]


def _sparse():
    model, told = torch.nn.Module(), []
    model.table = torch.nn.Parameter(torch.ones(4, 2))
    model.forward = lambda x: functional.embedding(x, model.table, sparse=True)
    watch_units(fully_shard(model), list, list, told.append, list)
    with pytest.raises(NotImplementedError):
        model(torch.arange(2)).sum().backward()
    return told


def test_watched_units_tell_of_a_sparse_gradient_before_torch_fails_at_it():
    assert run_ranks(_sparse, 2) == [["table"], ["table"]]


def _second():
    model, told = build("mlp"), []
    watch_units(fully_shard(model), list, list, list, functools.partial(told.append, "second"))
    x, y = batches("mlp", steps=1)[0]
    loss = functional.cross_entropy(model(x.requires_grad_()), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="storage"):
        gradient.sum().backward()
    return told


def test_watched_units_tell_of_gradients_of_gradients_before_torch_fails_at_them():
    assert run_ranks(_second, 2) == [["second"], ["second"]]


def _seen(call):
    """Return the names of operators that `call` runs; what handles them is out of their way."""
    names = []

    def handle(operator, types, args, kwargs):
        names.append((operator.name(), [kind.__name__ for kind in types]))
        torch.ones(1)
        return operator(*args, **kwargs)

    with dispatching(handle):
        call()
    return names


def test_dispatching_hands_operators_over():
    assert _seen(lambda: torch.zeros(2).add_(1)) == [("aten::zeros", []), ("aten::add_.Tensor", [])]
    assert _seen(lambda: torch.rand(2, generator=torch.Generator())) == [
        ("aten::rand.generator", [])
    ]


def test_written_arguments():
    aten = torch.ops.aten

    assert written_arguments(aten.add.Tensor) == ([], [])
    assert written_arguments(aten.add_.Tensor) == ([0], [])
    assert written_arguments(aten.add.out) == ([], ["out"])
    assert written_arguments(aten.frexp.Tensor_out) == ([], ["mantissa", "exponent"])
    assert written_arguments(aten._foreach_add_.Scalar) == ([0], [])


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_is_checkpointed_is_told_apart(is_reentrant):
    found, x = [], torch.ones(2, requires_grad=True)

    def inner(y):
        found.extend([checkpointed(), checkpointed()])
        return y * y

    for _ in range(2):
        checkpoint(inner, x * 2, use_reentrant=is_reentrant)

    assert found[0] is found[1] is not None
    assert found[2] is found[3] is not None
    assert found[0] is not found[2]
    assert all(weakref.ref(region)() for region in found)
    with torch.autograd.graph.save_on_cpu():
        assert checkpointed() is None
    with torch.no_grad():
        assert checkpointed() is None


def test_takes_device():
    assert takes_device(torch.ops.aten.zeros.default)
    assert not takes_device(torch.ops.aten.add.Tensor)


@pytest.mark.filterwarnings("error")
def test_schedulers_know_the_step_of_their_optimizer():
    update = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    assert not is_step_of_scheduler(update.step)
    scheduler = torch.optim.lr_scheduler.StepLR(update, 1)
    assert is_step_of_scheduler(update.step)

    with pytest.raises(UserWarning, match="before `optimizer"):
        scheduler.step()
    scheduler = torch.optim.lr_scheduler.StepLR(update, 1)
    note_step(update)
    scheduler.step()


def test_gradient_hooks_are_those_that_autograd_runs():
    """Also what is taken out of them, put back, or shared with another parameter."""
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen = []
    assert not has_gradient_hooks(first)
    assert gradient_hooks(first) == ({}, {})
    handles = [
        first.register_hook(lambda _: seen.append("before")),
        first.register_post_accumulate_grad_hook(lambda _: seen.append("after")),
    ]
    assert has_gradient_hooks(first)
    assert len({*gradient_hook_numbers([first, second])[0]}) == 2
    taken = [dict(hooks) for hooks in gradient_hooks(first)]
    for hooks in gradient_hooks(first):
        hooks.clear()
    first.sum().backward()
    assert seen == []

    for hooks, own in zip(gradient_hooks(first), taken, strict=True):
        hooks.update(own)
    share_gradient_hooks(first, second)
    (first + second).sum().backward()
    assert sorted(seen) == ["after", "after", "before", "before"]

    for handle in handles:
        handle.remove()
    second.sum().backward()
    assert len(seen) == 4
    assert not has_gradient_hooks(second)
    assert gradient_hook_numbers([first, second]) == [(), ()]


def attribute_in_forward():
    mesh = init_device_mesh("cpu", (2,))
    network = torch.nn.Linear(4, 4)
    fully_shard(network, mesh=mesh)
    network.weight.factor = 3
    share_attributes(network)
    seen = []
    network.register_forward_pre_hook(lambda *_: seen.append(network.weight.factor))
    for _ in range(2):
        network(torch.ones(2, 4)).sum().backward()
    return seen


def test_gathered_parameters_have_the_attributes_of_their_shards():
    assert run_ranks(attribute_in_forward, 2) == [[3, 3], [3, 3]]


class _Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, one, two):
        return one * self.weight, two * 2


def joined_inputs():
    mesh = init_device_mesh("cpu", (2,))
    network = _Pair()
    fully_shard(network, mesh=mesh)
    network.set_requires_gradient_sync(False)
    network.set_reshard_after_backward(False)
    seen = []

    def watch(inputs):
        [step] = {x.grad_fn for x in inputs}
        seen.append((len(inputs), passes_straight(step), len(step.next_functions)))
        return [x * 3 for x in inputs]

    watch_joined_inputs(network, watch)
    one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, _ = network(one, two)
    first.sum().backward()
    # One gradient alone makes zeros of the other.
    seen += [first.tolist(), one.grad.tolist(), two.grad.tolist()]
    gathered = network.weight
    seen.append(has_shards_in_place(network))
    with torch.nn.utils.stateless._reparametrize_module(
        network, {"weight": next(iter(shards_of_gathered(network).values()))}
    ):
        seen.append(has_shards_in_place(network))
    early = gathered_with_gradient(network)
    reduce_sharded(network)
    shard = network.weight
    seen.append(early == {gathered, shard})
    seen.append(shards_of_gathered(network)[gathered] is shard)
    seen.append(replaced_parameter(network))
    with torch.nn.utils.stateless._reparametrize_module(network, {"weight": torch.ones(2)}):
        seen.append(replaced_parameter(network))
    seen.append(gathered_with_gradient(network) == {gathered, shard})
    shard.grad = None
    seen.append(gathered_with_gradient(network) == set())
    return seen


def test_joined_inputs_are_replaced_and_gathered_parameters_known():
    expected = [(2, True, 2), [3.0, 3.0], [3.0, 3.0], [0.0, 0.0]]
    expected += [False, True, True, True]
    expected += ["", "weight", True, True]

    assert run_ranks(joined_inputs, 2) == [expected] * 2


def parts_of_units():
    """Return what is said of a network of two units, of which the inner one is called first."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    fully_shard(network[1])
    fully_shard(network)
    begin_units(network)
    seen = [parts_with_parameters(each) for each in (network, network[1])]
    before = is_gathered(network)
    network[1](torch.ones(2))
    network(torch.ones(2)).sum().backward()
    network.unshard()
    return seen == [[network[0]], [network[1][0]]], before, is_gathered(network)


def test_parts_of_units_are_known_and_may_be_called_first():
    assert run_ranks(parts_of_units, 2) == [(True, False, True)] * 2


def noted_of_forward():
    """Return whether each note is another one inside of the forward, and as before after it."""
    mesh = init_device_mesh("cpu", (2,))
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    fully_shard(network[1], mesh=mesh)
    fully_shard(network, mesh=mesh)
    begin_units(network)
    notes = notes_of_forward(network)

    def values():
        return [getattr(owner, name) for owner, name in notes]

    before, inside = values(), []
    network[1][0].register_forward_hook(lambda *_: inside.append(values()))
    with torch.no_grad():
        network(torch.ones(2))
    return [a != b for a, b in zip(before, inside[0], strict=True)], values() == before


def test_what_units_note_of_a_forward_is_known():
    # Of two units the unit and its group, and which one is the outermost that runs.
    assert run_ranks(noted_of_forward, 2) == [([True] * 5, True)] * 2


def opened_inputs():
    mesh = init_device_mesh("cpu", (2,))
    network = _Pair()
    fully_shard(network, mesh=mesh)
    seen = []

    def opened(value):
        (args, kwargs) = value
        seen.append([type(x) for x in args])
        return (tuple(x + 1 for x in args), kwargs), lambda result: result

    open_inputs(network, opened)
    one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    network(one, two)[1].sum().backward()
    return seen, two.grad.tolist()


def test_inputs_of_units_are_opened():
    assert run_ranks(opened_inputs, 2) == [([[torch.Tensor] * 2], [2.0, 2.0])] * 2


class _Wrapper(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "seen"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return "seen"


def test_a_wrapper_has_no_memory_and_says_what_it_was_made_of():
    wrapper = empty_wrapper(_Wrapper, (4, 6), torch.ones(2, requires_grad=True))
    assert wrapper.shape == "seen"
    with of_subclass():
        assert (wrapper.shape, wrapper.dtype) == ((4, 6), torch.float32)
        assert (wrapper.is_leaf, wrapper.requires_grad) == (True, True)


def test_write_count_is_that_of_all_views():
    tensor = torch.zeros(3)
    before = write_count(tensor)
    tensor[0].fill_(1)

    assert write_count(tensor) == before + 1
    assert write_count(tensor[1:]) == before + 1
    assert viewed(tensor[1:]) is tensor
    assert viewed(tensor) is None


def test_tensors_in_a_memory_are_counted_with_views():
    tensor = torch.zeros(3)
    view = tensor[1:]

    assert tensors_in(tensor.untyped_storage()) == 2
    del view
    assert tensors_in(tensor.untyped_storage()) == 1


def test_replace_tensors_tells_modules():
    model = torch.nn.Sequential(torch.nn.LSTM(2, 3), torch.nn.BatchNorm1d(3))
    replace_tensors(model, lambda t: t.double() if t.is_floating_point() else t)

    assert {t.dtype for t in model[0]._flat_weights} == {torch.float64}
    assert model[1].running_mean.dtype == torch.float64
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_storages_keep_what_is_attached_to_them():
    tensor = torch.empty(3, device="meta")
    vars(tensor.untyped_storage())["note"] = "kept"

    parameter = torch.nn.Parameter(tensor.view(3, 1).data)

    assert vars(parameter.untyped_storage())["note"] == "kept"


@pytest.mark.parametrize("is_without", [True, False])
def test_without_stack_traces_no_node_of_a_trace_has_one(is_without):
    with without_stack_traces() if is_without else nullcontext():
        graph = torch.export.export(torch.nn.ReLU(), (torch.ones(2),), strict=False).graph

    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [bool(node.stack_trace) for node in calls] == [not is_without]


def test_operators_that_call_graphs_are_recognised():
    class Off(torch.nn.Module):
        def forward(self, x):
            with torch.no_grad():
                return x * 2

    graph = torch.export.export(Off(), (torch.ones(2),), strict=False).graph
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    assert any(map(is_higher_order, calls))
    assert not is_higher_order(torch.ops.aten.mul.Tensor)


def test_forward_hooks_are_left_out_and_come_back():
    net, calls = torch.nn.Linear(2, 2), []
    net.register_forward_hook(lambda *_: calls.append("forward"))
    assert hooks_of(net) == {"forward"}
    with without_forward_hooks(net):
        net.register_forward_hook(lambda *_: calls.append("inside")).remove()
        net(torch.ones(2))
    assert calls == []
    net(torch.ones(2))
    assert calls == ["forward"]
    net.register_forward_pre_hook(lambda *_: None)
    net.register_full_backward_hook(lambda *_: None)
    assert hooks_of(net) == {"forward", "forward_pre", "backward"}


def test_hooks_of_a_module_are_registered_on_its_copy():
    net, calls = nn.Linear(2, 2), []
    first = net.register_forward_hook(lambda *_: calls.append("first"))
    other = copy.deepcopy(net)
    first.remove()
    net.register_forward_pre_hook(lambda *_: calls.append("before"))
    net.register_forward_hook(lambda *args: calls.append(len(args)), with_kwargs=True)
    net.register_full_backward_pre_hook(lambda *_: calls.append("backward"))
    net.register_full_backward_hook(functools.partial(lambda *_: calls.append("after")))
    for key in registered_hooks(other):
        forget_hook(other, key)
    for hook in registered_hooks(net).values():
        assert hook.is_of_script
        hook.register(other)
    other(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == ["before", 4, "backward", "after"]


def test_hooks_of_torch_and_msrun_are_not_of_the_script():
    net = nn.Linear(2, 2)
    net.register_forward_hook(functools.partial(has_own_call))
    net.register_forward_hook(torch.utils.hooks.unserializable_hook)
    net.register_forward_hook(functools.partial(lambda *_: None))
    assert [hook.is_of_script for hook in registered_hooks(net).values()] == [False, False, True]


def test_compiled_functions_run_eagerly():
    seen = []

    def backend(module, _inputs):
        seen.append(module)
        return module

    double = torch.compile(lambda x: x * 2, backend=backend)
    with eagerly():
        assert double(torch.ones(1)).item() == 2.0
    assert seen == []
    double(torch.ones(1))
    assert len(seen) == 1


def test_a_function_is_compiled_again_under_a_watch_that_does_not_see_it():
    seen, names = [], []

    def backend(module, _inputs):
        seen.append(module)
        return module

    class Watch(TorchFunctionMode):
        is_watch = True

        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    double = torch.compile(lambda x: x.mul(2), backend=backend)
    x = torch.ones(1)
    with eagerly(), Watch():
        double(x)
        assert (len(seen), names.count("mul")) == (0, 1)
        with compiled_again():
            assert double(x).item() == 2.0
        assert (len(seen), names.count("mul")) == (1, 1)
    with compiled_again():
        double(x)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "loss_fn", [functional.cross_entropy, lambda *of: functional.cross_entropy(*of) * 2]
)
def test_the_compiler_does_not_follow_what_is_off_it(loss_fn):
    frames, calls = [], []

    def inner(name):
        frames.append(sys._getframe())  # which the compiler would warn of
        calls.append((name, torch.compiler.is_compiling()))

    class Watch(TorchFunctionMode):
        @off_compiler
        def __torch_function__(self, func, types, args=(), kwargs=None):
            inner(func.__name__)
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(loss_fn, backend="eager")
    x, target = torch.randn(4, 5), torch.randint(0, 5, (4,))
    with Watch():
        assert compiled(x, target).item() == loss_fn(x, target).item()
    assert ("cross_entropy", False) in calls
    assert [is_compiling for _, is_compiling in calls if is_compiling] == []


def test_what_compile_returns_is_recognised():
    net = torch.nn.Linear(2, 2)
    assert is_compiled(torch.compile(net, backend="eager"))
    assert not is_compiled(net)


def test_what_is_compiled_in_place_is_recognised():
    net = torch.nn.Linear(2, 2)
    assert not is_compiled_in_place(net)
    net.compile(backend="eager")
    assert is_compiled_in_place(net)


@pytest.mark.parametrize("is_early", [False, True])
def test_what_is_never_compiled_runs_as_written(is_early):
    inside, seen = [], []
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    net.register_forward_hook(lambda *_: inside.append(torch.compiler.is_compiling()))
    if is_early:
        net.compile(backend=lambda graph, _: seen.append(graph) or graph)
    never_compile(net, "a test")
    if not is_early:
        net.compile(backend=lambda graph, _: seen.append(graph) or graph)

    net(torch.ones(2))
    torch.compile(net, backend="eager")(torch.ones(2))
    assert (inside, seen) == ([False, False], [])


def test_what_keeps_off_the_compiler_is_recognised():
    own, callers = inspect.unwrap(torch.manual_seed).__code__, []

    def profile(frame, event, _):
        if event == "call" and frame.f_code is own:
            while (frame := frame.f_back).f_code is not here:
                callers.append(frame.f_code)

    here = inspect.currentframe().f_code
    sys.setprofile(profile)
    try:
        torch.manual_seed(0)
    finally:
        sys.setprofile(None)
    assert callers
    assert all(map(keeps_off_compiler, callers))
    assert not keeps_off_compiler(own)


def test_what_is_never_compiled_is_copied():
    net = torch.nn.Linear(2, 2)
    never_compile(net, "a test")
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.nn.init.zeros_(other.weight)
        assert torch.equal(other(torch.ones(2)), other.bias)
    assert not torch.equal(net(torch.ones(2)), net.bias)


def test_parameters_are_replaced_by_plain_tensors_and_come_back():
    net = torch.nn.Linear(2, 2, bias=False)
    own, part = net.weight, torch.ones(3, 2, requires_grad=True)

    def failing():
        with parameters_replaced(net, {"weight": part}):
            net(torch.ones(2)).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert net.weight is own
    assert own.grad is None
    assert part.grad is not None


def test_calls_of_a_module_go_elsewhere_and_back():
    net = nn.Linear(2, 1)
    seen = []
    net.register_forward_hook(lambda *_: seen.append("hook"))
    own = call_of(net)
    with calls_replaced({net: lambda x: (x, own(x))}):
        given, found = net(torch.ones(2))
    assert given.shape == (2,)
    assert torch.equal(found, net(torch.ones(2)))
    assert seen == ["hook"] * 2
    assert call_of(net) == own


def _in_inference_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for module in (*model, model):
        fully_shard(module)
    watch_units(model, *4 * [lambda *_: None])
    x = torch.ones(2, 4)
    with torch.inference_mode():
        assert model(x).is_inference()
    model(x).sum().backward()
    return [param.grad is not None for param in model.parameters()]


def test_units_gathered_in_inference_mode_train():
    assert run_ranks(_in_inference_mode, 2) == 2 * [4 * [True]]


def _listed():
    replace_list_functions(lambda tensor: tensor.dim() or None, lambda *_: None, lambda *_: None)
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    gradients = [param.grad for param in params]
    total = nn.utils.get_total_norm(gradients).item()
    nn.utils.clip_grad_value_(params, 1.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([_infinite()], 1.0, error_if_nonfinite=True)
    module = nn.ParameterList(params)
    lists = []
    average = AveragedModel(module, multi_avg_fn=lambda own, *_: lists.append(len(own)))
    for _ in range(2):
        average.update_parameters(module)
    return total, [gradient.sum().item() for gradient in gradients], lists


def _infinite():
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.full_like(param, torch.inf)
    return param


@functools.cache
def _in_new_interpreter():
    """Return what functions find where no test has replaced any of torch yet, each in a child."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_each_in_child).result()


def _each_in_child():
    found = {}
    functions = [_listed, _values_of_dtensors, _plain_beside_dtensors, _whole_in_place_of_refused]
    for function in (*functions, _shards_shown):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            found[function.__name__] = pool.submit(function).result()
    return found


def test_functions_over_lists_split_them_by_kind():
    total, gradients, lists = _in_new_interpreter()["_listed"]

    assert (total, gradients) == (pytest.approx(20**0.5), [4.0, 1.0])
    # A list of each kind, where torch makes one of a device and type.
    assert lists == [1, 1]


def _values_of_dtensors():
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    read = []

    def check(tensor):
        read.append(tensor.placements)

    watch_sharded_values(check, lambda error: KeyError(str(error)))
    whole = DTensor.from_local(torch.tensor(2.5), mesh, [Replicate()], run_check=False)
    part = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()], run_check=False)
    part.requires_grad_()
    plain = torch.ones(3, requires_grad=True)
    values = [f"{whole:.2f}", float(whole), bool(whole > 2), part.detach().item()]
    try:
        (functional.cross_entropy(plain, torch.tensor(0)) + part * 2).backward()
    except KeyError as error:
        return values, [str(placement) for placement, *_ in read], str(error)


def test_values_and_backward_passes_of_dtensors_are_watched():
    values, placements, said = _in_new_interpreter()["_values_of_dtensors"]

    assert values == ["2.50", 2.5, True, 1.0]
    assert len(placements) == len(values)
    assert "mixed torch.Tensor and DTensor" in said


def _plain_beside_dtensors():
    """Compute DTensors with plain tensors; run in a process of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def placed(value):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

    def take(like, value):
        return like, placed(value)

    def draw(operator, args, _):
        aten, like = torch.ops.aten, args[0]
        is_normal = operator in (aten.randn_like.default, aten.normal_.default)
        is_normal |= operator in draws_by_values() - {aten.bernoulli.default}
        return placed(torch.full(like.shape, float(is_normal)))

    fills = [torch.Tensor.normal_, torch.Tensor.uniform_, lambda x: x.bernoulli_(0.5)]
    numbers = []

    def number(like, value):
        numbers.append((like.shape[0], float(value)))

    whole = DTensor.full_tensor
    firsts = [replace_element_methods(take, draw, number, whole, multiply=take) for _ in range(2)]
    tensor, plain = placed(torch.ones(3)), torch.arange(3.0)
    products = [plain @ tensor, tensor.matmul(plain)]
    tensor.add_(plain)
    tensor += plain
    tensor.mul_(torch.tensor(4.0)).div_(4)
    tensor * 5  # writes nothing
    found = [
        tensor,
        plain - tensor,
        tensor.lerp(plain, 0.5),
        torch.randn_like(tensor),
        torch.rand_like(tensor),
        torch.normal(tensor, 0.5),
    ]
    values = [each.to_local().tolist() for each in found]
    filled = [each(tensor.clone()).to_local().tolist() for each in fills]
    tensor.data = placed(torch.full((3,), 7.0))
    of_plain = nn.Parameter(torch.zeros(3))
    of_plain.data = tensor
    written = [tensor.to_local().tolist(), of_plain.tolist()]
    own = nn.Parameter(tensor)
    own.data = tensor + 1  # memory of its own
    own.data = tensor  # it would be that of another
    written += [each.to_local().tolist() for each in (own, *products)]
    return firsts, values + filled, written, numbers


def test_methods_of_dtensors_take_plain_tensors():
    firsts, values, written, numbers = _in_new_interpreter()["_plain_beside_dtensors"]

    assert firsts == [True, False]
    drawn = [[1] * 3, [0] * 3]
    assert values == [[1, 3, 5], [-1, -2, -3], [0.5, 2, 3.5], *drawn, [1] * 3, *drawn, [0] * 3]
    assert written == [[7.0] * 3] * 2 + [[8.0] * 3, 3.0, 3.0]
    assert numbers == [(3, 4.0), (3, 4.0)]


def _whole_in_place_of_refused():
    """Return what operators return that torch refuses for DTensors, and what a function got."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False)
    calls = []

    def compute(operator, args, _, written):
        calls.append((str(operator), [value is tensor for value in written]))
        if args[1:2] == (7,):
            return NotImplemented
        return as_replicated(torch.ones(2), mesh)

    replace_refused("renorm_ take", compute)
    found = [tensor.renorm_(2, 0, 0.1), tensor.take(torch.tensor(1))]
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        tensor.renorm_(7, 0, 0.1)
    bases = [lost_base(each) for each in (tensor, tensor.view(4))]  # of views with its memory
    return [each.to_local().tolist() for each in found], calls, bases


def test_function_computes_what_torch_refuses_for_dtensors():
    found, calls, bases = _in_new_interpreter()["_whole_in_place_of_refused"]

    assert found == [[[1.0, 1.0]] * 2, [1.0, 1.0]]
    renorm = ("aten.renorm_.default", [True])
    assert calls == [renorm, ("aten.take.default", []), renorm]
    assert bases == [None, None]


def test_a_backward_pass_knows_whether_it_keeps_its_graph():
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: found.append(keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert found == [True, False]


def _shards_shown():
    """Return what a unit has after its forward, with its shards shown, and once it has stepped."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    unit = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    unit.set_reshard_after_backward(False)
    loss = unit(torch.ones(1, 2)).sum()
    whole = unit.weight
    loss.backward()
    is_whole = unit.weight is whole
    show_shards(unit)
    shard, memory = unit.weight, whole.untyped_storage().size()
    unreduced = unreduced_gradients(unit)
    whole.grad = torch.ones(2, 2)
    set_by_hand = unreduced_gradients(unit)
    whole.grad = None
    unit(torch.ones(1, 2))
    return is_whole, shard is whole, memory > 0, unit.weight is whole, unreduced, set_by_hand


def test_shards_are_shown_and_what_was_gathered_stays():
    *kept, unreduced, set_by_hand = _in_new_interpreter()["_shards_shown"]

    assert kept == [True, False, True, True]
    assert unreduced == []
    assert set_by_hand == ["weight"]


class _OwnCall(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


def test_call_of_a_script_is_told_from_those_of_torch():
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert has_own_call(_OwnCall(2, 2))
    assert not any(map(has_own_call, (nn.Linear(2, 2), graph)))


def test_hooks_of_all_modules_are_known():
    assert not has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert has_global_hooks()
    finally:
        handle.remove()
    assert not has_global_hooks()


def _branches():
    weight = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x, backend="eager")(torch.ones(1))  # has the compiler loaded
    pred, x = torch.tensor(1, dtype=torch.bool), torch.ones(2)
    with eagerly():
        torch.cond(pred, lambda x: x * weight, lambda x: x - weight, (x,)).sum().backward()
    with without_dispatch_in_branches(), dispatching(_run), torch.no_grad():
        y = torch.cond(pred, torch.sin, torch.cos, (x,))
    try:
        torch.cond(pred, lambda x: print() or x, torch.cos, (x,))
    except RuntimeError as error:
        return weight.grad.tolist(), y.tolist() == x.sin().tolist(), is_of_compiler(error)
    return None


def _run(func, _, args, kwargs):
    return func(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_branches_of_higher_order_operators_compile_where_others_run_eagerly():
    assert run_ranks(_branches, 1)[0] == ([1.0, 1.0], True, True)
    assert not is_of_compiler(RuntimeError())


def test_backward_runs_nodes_by_their_number():
    x, order = torch.ones(1, requires_grad=True), []
    first, second = x * 2, x * 3
    assert torch_compat.node_number(second.grad_fn) + 1 == torch_compat.next_node_number()
    assert torch_compat.node_number(first.grad_fn) < torch_compat.node_number(second.grad_fn)
    torch_compat.set_node_number(first.grad_fn, torch_compat.node_number(second.grad_fn) + 1)
    for name, tensor in (("first", first), ("second", second)):
        tensor.grad_fn.register_hook(lambda *_, name=name: order.append(name))
    (first + second).backward()

    assert order == ["first", "second"]


def test_modes_of_a_thread_are_active_in_another():
    seen = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("function")
            return func(*args, **(kwargs or {}))

    def watch(operator, _, args, kwargs):
        seen.append(operator.__name__)
        return operator(*args, **kwargs)

    def compute(found):
        with torch_compat.with_modes(found):
            torch.ones(1).add(1)
        torch.ones(1).add(1)

    with Seen(), torch_compat.dispatching(watch):
        found = torch_compat.modes()
    thread = threading.Thread(target=compute, args=(found,))
    thread.start()
    thread.join()
    assert "function" in seen
    assert seen.count("add.Tensor") == 1


def pending():
    mesh = init_device_mesh("cpu", (2,))
    summand = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    total = summand.redistribute(placements=[Replicate()], async_op=True)
    before = torch_compat.is_pending(total)
    torch_compat.wait(total)
    return before, torch_compat.is_pending(total), total.to_local().tolist()


def test_what_is_under_way_is_known_and_awaited():
    assert run_warm(pending, 2) == 2 * [(True, False, [2.0, 2.0])]


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        del ctx
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient / 2


class _Applies(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.applied = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    def apply_own(self, kind, apply, args, kwargs):
        self.applied.append(kind)
        return apply(*args, **kwargs) + 1


def test_modes_apply_own_functions_of_scripts():
    torch_compat.apply_own_functions_by_modes()
    torch_compat.apply_own_functions_by_modes()
    x = torch.ones(2, requires_grad=True)
    with _Applies() as mode:
        inside = _Halves.apply(x)
    assert mode.applied == [_Halves]
    assert inside.tolist() == [1.5, 1.5]
    assert _Halves.apply(x).tolist() == [0.5, 0.5]


def test_steps_that_a_backward_pass_runs_are_known():
    x = torch.ones(2, requires_grad=True)
    used, unused = x * 2, x * 3
    found = []
    used.register_hook(
        lambda _: found.extend(torch_compat.is_to_run(y.grad_fn) for y in (used, unused))
    )
    used.sum().backward()
    assert found == [True, False]


def _written_while_gathered():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    model.bias.requires_grad_(requires_grad=False)
    fully_shard(model, mesh=mesh)
    torch_compat.watch_units(model, *[lambda *_: None] * 4)
    torch_compat.begin_units(model)
    counts = torch_compat.writes_to_frozen(model)
    model.unshard()
    with torch.no_grad():
        model.weight[:] = torch.arange(20.0).view(5, 4)
        model.bias.fill_(2)
    written = torch_compat.writes_to_frozen(model)
    model.reshard()
    values = [param.full_tensor().tolist() for param in model.parameters()]
    return counts["bias"] != written["bias"], list(counts), values


def test_shards_get_what_is_written_while_they_are_gathered():
    expected = (True, ["bias"], [torch.arange(20.0).view(5, 4).tolist(), [2.0] * 5])
    assert run_ranks(_written_while_gathered, 2) == [expected] * 2


def test_the_first_of_ranks_that_are_not_there_sends_nothing():
    with torch_compat.fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        x = torch.ones(2)
        torch.distributed.all_reduce(x, group=mesh.get_group())
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 4)
    assert not torch.distributed.is_initialized()


def _beside_ranks_that_are_not_there():
    whole = torch.distributed.group.WORLD
    if torch.distributed.get_rank() == 0:
        with torch_compat.fake_ranks(4):
            init_device_mesh("cpu", (2, 2))
            assert torch.distributed.get_world_size() == 4
    assert torch.distributed.group.WORLD is whole
    # Groups that are made later have one name on both ranks, by which these find each other.
    x = torch.ones(1)
    torch.distributed.all_reduce(x, group=torch.distributed.new_group([0, 1]))
    torch.distributed.all_reduce(x)
    return x.item(), torch.distributed.get_backend()


def test_ranks_that_are_there_stay_beside_those_that_are_not():
    assert run_ranks(_beside_ranks_that_are_not_there, 2) == [(4.0, "gloo")] * 2


def test_functions_are_not_seen_inside_of_a_context():
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    seen = []
    with Seen():
        x = torch.ones(2).exp()
        with torch_compat.without_functions():
            x.sum()
    assert "exp" in seen
    assert "sum" not in seen


def test_scripts_are_optimized_again_behind_the_context():
    is_optimized = torch._C._get_graph_executor_optimize
    assert is_optimized()
    with torch_compat.unoptimized_scripts():
        assert not is_optimized()
    assert is_optimized()


def test_reentrant_checkpoints_run_with_gradients_inside_of_the_context():
    def run(x):
        modes.append(torch.is_grad_enabled())
        return 2 * x

    modes = []
    x = torch.ones(2, requires_grad=True)
    with torch_compat.without_reentrant_checkpoints():
        inside = checkpoint(run, x, use_reentrant=True)
    behind = checkpoint(run, x, use_reentrant=True)
    assert modes == [True, False]
    assert inside.grad_fn.name() == "MulBackward0"
    assert behind.grad_fn.name() == "CheckpointFunctionBackward"


def test_a_transform_may_differentiate_by_parameters():
    model, x = nn.Linear(2, 2), torch.ones(3, 2)
    params = {name: param.detach() for name, param in model.named_parameters()}
    found = []
    model.register_forward_pre_hook(
        lambda called, _: found.append(torch_compat.is_differentiated(called))
    )

    model(x)
    torch.func.grad(lambda value: model(value).sum())(x)
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(params)

    assert found == [False, False, True]
