"""Data parallel: the same losses as one process, and exactly the configured collectives."""

import itertools
import math
import time
from functools import partial

import pytest
import torch
from ranks import (
    MODELS,
    OPTIMIZERS,
    Counted,
    assert_equal_curves,
    batches,
    build,
    oracle,
    run_warm,
)
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor
from msrun.parallel.torch_compat import tensors_in

pytestmark = pytest.mark.torch

DP = {"mesh": {"dp": -1}}
MLP_BYTES = 4 * (16 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10)


def reduced(fuse, accumulate):
    """Return the collectives of one step after the first, and the bytes of gradients."""
    runtime = msrun.init({"reduce": {"fuse": fuse}, "accumulate": accumulate})
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    for x, y in batches("mlp", steps=2):
        with Counted() as counted:
            runtime.step(network, update, functional.cross_entropy, x, y)
    return dict(counted.calls), dict(counted.bytes)


@pytest.mark.sampled
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("fuse", "buckets"),
    [
        ("25MiB", 1),
        (1, 6),
        # The last parameters first: fc3 and the bias of fc2 do not fit with its weight.
        (32 * 32 * 4, 3),
        ("module", 3),
        ([2, 4], 3),
        ([1], 2),
        ([6, 9], 1),
    ],
)
def test_fusion_is_as_configured(fuse, buckets, accumulate):
    calls, sent = run_warm(reduced, 2, fuse, accumulate)[0]

    # One more is the loss, 43 numbers of eight bytes.
    assert calls == {"allreduce_": buckets + 1}
    # Each parameter travels with one number that says whether anybody has its gradient, and the
    # last bucket with the votes on a change of what is trained.
    assert sent == {"allreduce_": MLP_BYTES + 4 * (6 + 2) + 43 * 8}


def gradients_of(config):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    x, y = (part.chunk(runtime.world_size)[runtime.rank] for part in batches("mlp")[0])
    functional.cross_entropy(network(x), y).backward()
    return [param.grad.tolist() for param in network.parameters()]


def test_sum_is_the_mean_times_the_ranks():
    mean = run_warm(gradients_of, 4, DP)[0]
    total = run_warm(gradients_of, 4, DP | {"reduce": {"op": "sum"}})[0]

    for one, other in zip(mean, total, strict=True):
        torch.testing.assert_close(4 * torch.tensor(one), torch.tensor(other))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_short_type_on_the_wire_is_near(dtype):
    exact = run_warm(gradients_of, 2, DP)
    near = run_warm(gradients_of, 2, DP | {"reduce": {"dtype": dtype}})

    assert near[0] == near[1]
    for one, other in zip(exact[0], near[0], strict=True):
        assert one != other
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=2e-3, rtol=2e-2)


def own_bias(network, rank):
    with torch.no_grad():
        network.fc2.bias.add_(rank)
    return network


def excluded(options, max_norm):
    """Return the parameters after some steps."""
    runtime = msrun.init({"reduce": {"exclude": ["fc2.*"]}} | options)
    network = runtime.shard(own_bias(build("mlp"), runtime.rank))
    update = OPTIMIZERS["sgd"](network.parameters())
    for x, y in batches("mlp"):
        part = [t.chunk(runtime.world_size)[runtime.rank] for t in (x, y)]
        runtime.step(network, update, functional.cross_entropy, *part, max_norm=max_norm)
    return {name: full_tensor(param).tolist() for name, param in network.named_parameters()}


@pytest.mark.sampled
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_excluded_parameters_go_their_own_way(zero, max_norm):
    first, second = run_warm(excluded, 2, {"optimizer": {"zero": zero}}, max_norm)

    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"fc2.weight", "fc2.bias"}


def norm_with_excluded(options, uses_all):
    """Return the global norm; where not all is used, rank 1 has no gradient of fc2."""
    runtime = msrun.init({"reduce": {"exclude": ["fc2.*"]}} | options)
    network = runtime.shard(own_bias(build("mlp"), runtime.rank))
    x, y = (part.chunk(2)[runtime.rank] for part in batches("mlp")[0])
    functional.cross_entropy(network(x), y).backward()
    if not uses_all and runtime.rank == 1:
        network.fc2.zero_grad()
    return runtime.clip_grad_norm_(network, 1.0).item()


@pytest.mark.sampled
@pytest.mark.parametrize("uses_all", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_each_ranks_excluded_parameters_count_in_one_norm(zero, uses_all):
    networks = [own_bias(build("mlp"), rank) for rank in range(2)]
    x, y = (part.chunk(2) for part in batches("mlp")[0])
    for rank, network in enumerate(networks):
        functional.cross_entropy(network(x[rank]), y[rank]).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(*(n.parameters() for n in networks), strict=True)]
    shared = [(a + b) / 2 for a, b in (*pairs[:2], *pairs[4:])]
    own = [gradient for pair in pairs[2:4] for gradient in (pair if uses_all else pair[:1])]
    expected = torch.cat([gradient.flatten() for gradient in shared + own]).norm().item()

    found = run_warm(norm_with_excluded, 2, {"optimizer": {"zero": zero}}, uses_all)

    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=1e-6)


def clipped_by_hand():
    runtime = msrun.init({"mesh": {"tp": 2}, "mode": "manual"})
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    batch = batches("mlp")[0]
    before = [param.tolist() for param in network.parameters()]
    with pytest.raises(msrun.errors.UsageError) as caught:
        runtime.step(network, update, functional.cross_entropy, *batch, max_norm=1.0)
    with pytest.raises(msrun.errors.UsageError):
        runtime.clip_grad_norm_(network, 1.0)
    assert before == [param.tolist() for param in network.parameters()]
    assert all(param.grad is None for param in network.parameters())
    return caught.value.message


def test_a_norm_over_an_axis_that_the_script_divides_is_refused():
    assert run_warm(clipped_by_hand, 2)[0] == (
        "parallel.mode: manual does not say which gradients are sharded over tp (size 2), "
        "so there is no norm of the whole model"
    )


class Forked(nn.Module):
    """Uses one of two layers, as its first sample says; a third one never."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)

    def forward(self, x):
        return (self.left if x[0, 0] > 0 else self.right)(self.stem(x))


def forked(accumulate):
    runtime = msrun.init({"accumulate": accumulate})
    torch.manual_seed(0)
    network = runtime.shard(Forked())
    update = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.ones(2, 4) if runtime.rank == 0 else -torch.ones(2, 4)
    runtime.step(network, update, functional.mse_loss, x, torch.zeros(2, 2))
    return {
        name: None if param.grad is None else param.grad.tolist()
        for name, param in network.named_parameters()
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_one_rank_uses_has_a_gradient_on_all_and_what_none_uses_on_none(accumulate):
    first, second = run_warm(forked, 2, accumulate)

    assert first == second
    assert first["never.weight"] is None
    assert first["left.weight"]
    assert first["right.weight"]


class Adapted(nn.Module):
    """A frozen stem; an adapter that is trained, where there is use for it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 10).requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(10, 10)

    def forward(self, x, is_adapted):
        h = self.stem(x)
        return self.adapter(h) if is_adapted else h


def adapted():
    torch.manual_seed(0)
    return Adapted()


ADAPTED, FROZEN = [True, False], [False, False]


def routed(options, ways, *, with_graph):
    """Train where a rank goes its way; return losses and norms, or what is refused."""
    runtime = msrun.init(options)
    network = runtime.shard(adapted())
    update = OPTIMIZERS["sgd"](network.parameters())
    found = []
    for batch in batches("mlp"):
        x, y = (part.chunk(2)[runtime.rank] for part in batch)
        x.requires_grad_(with_graph)
        way = ways[runtime.rank]
        try:
            loss = runtime.step(network, update, functional.cross_entropy, x, way, y, max_norm=0.1)
        except msrun.errors.UsageError as error:
            return error.message
        found.append((loss.item(), runtime.clip_grad_norm_(network, 1.0).item()))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"reduce": {"fuse": "module"}}])
def test_a_rank_may_have_no_gradient_at_all(options, with_graph):
    network = adapted()
    update = OPTIMIZERS["sgd"](network.parameters())
    expected = []
    for x, y in batches("mlp"):
        update.zero_grad()
        halves = zip(x.chunk(2), (True, False), y.chunk(2), strict=True)
        loss = sum(functional.cross_entropy(network(a, way), b) for a, way, b in halves) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        update.step()
        norm = torch.cat([p.grad.flatten() for p in network.adapter.parameters()]).norm()
        expected.append((loss.item(), norm.item()))

    for found in run_warm(partial(routed, with_graph=with_graph), 2, options, ADAPTED):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_loss_that_trains_nothing_is_refused():
    sentence = "the loss of no rank depends on a parameter that is trained"

    assert run_warm(partial(routed, with_graph=False), 2, {}, FROZEN) == [sentence, sentence]


def unequal():
    """Build a model whose ranks begin with other weights and buffers."""
    torch.manual_seed(msrun.init().rank)
    network = msrun.init().shard(MODELS["conv"][0]())
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    runtime = msrun.init()
    for x, y in batches("conv", steps=20):
        part = (t.chunk(runtime.world_size)[runtime.rank] for t in (x, y))
        runtime.step(network, update, functional.cross_entropy, *part)
    return {name: value.tolist() for name, value in network.state_dict().items()}


def test_ranks_begin_and_stay_equal_to_the_bit():
    first, second = run_warm(unequal, 2)

    assert first == second


def plain_loop(accumulate):
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    losses = []
    for batch in batches("mlp"):
        parts = [t.chunk(runtime.world_size)[runtime.rank].chunk(accumulate) for t in batch]
        update.zero_grad()
        total = 0.0
        for index, (a, b) in enumerate(zip(*parts, strict=True)):
            loss = functional.cross_entropy(network(a), b) / accumulate
            if index < accumulate - 1:
                with runtime.no_sync(network):
                    loss.backward()
            else:
                loss.backward()
            total += loss.detach()
        update.step()
        losses.append(runtime.mean_over_data(total).item())
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plain_loop_is_right_too(accumulate):
    assert_equal_curves(run_warm(plain_loop, 2, accumulate), oracle("mlp"))


def is_reached(count, memory):
    """Wait until `count` tensors lie in `memory`: threads of a group let go of it late."""
    deadline = time.monotonic() + 10
    while tensors_in(memory) != count and time.monotonic() < deadline:
        pass
    return tensors_in(memory) == count


def rooms(layers):
    """Return whether gradients had the memory of the pass before, and of what became of others."""
    runtime = msrun.init({"reduce": {"fuse": 1}})
    model = runtime.shard(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers))))
    network = model[-1]
    memories, reached, held = [], [], None
    for factor in (1.0, 2.0, 3.0):
        (0 * model(torch.ones(1, 4)) + network(torch.full((1, 4), factor))).sum().backward()
        memories.append(network.weight.grad.untyped_storage())
        held = network.weight.grad[1:] if factor == 2.0 else held
        model.zero_grad()
        reached.append(is_reached(2 if factor == 2.0 else 1, memories[-1]))
    with runtime.no_sync(model):
        reached.append(is_reached(0, memories[-1]))
    return [a is b for a, b in itertools.pairwise(memories)], held.tolist(), all(reached)


@pytest.mark.parametrize("layers", [1, 3])
def test_memory_of_gradients_serves_the_next_ones_once_nobody_has_them(layers):
    """New memory of a host costs a page fault each 4 KiB; what adds up meanwhile has its own."""
    assert run_warm(rooms, 2, layers) == [([True, False], [[2.0] * 4] * 3, True)] * 2


def started_before_the_end():
    """Return the order in which gradients came and buckets were sent."""
    runtime = msrun.init({"reduce": {"fuse": "module"}})
    network = runtime.shard(build("mlp"))
    events, nodes = [], []
    for name, param in network.named_parameters():
        # Hooks on a parameter itself are refused in a plain loop.
        node = param.view_as(param).grad_fn.next_functions[0][0]
        nodes.append(node)
        node.register_hook(lambda *_, name=name: events.append(name))

    class Sent(Counted):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "allreduce" in func.name():
                events.append("sent")
            return super().__torch_dispatch__(func, types, args, kwargs)

    x, y = batches("mlp")[0]
    loss = functional.cross_entropy(network(x), y)
    with Sent():
        loss.backward()
    return events


def test_reduction_begins_while_backward_runs():
    for events in run_warm(started_before_the_end, 2):
        assert events.index("sent") < events.index("fc1.weight")
        assert events.count("sent") == 3


def dropping(seed):
    runtime = msrun.init({"seed": seed})
    network = runtime.shard(nn.Dropout(0.5))
    x = torch.ones(64)
    return network(x).tolist(), network(x).tolist()


def test_data_parallel_ranks_drop_other_samples_and_repeat_themselves():
    first = run_warm(dropping, 2, 3)

    assert first[0] != first[1]
    assert first == run_warm(dropping, 2, 3)
    assert first != run_warm(dropping, 2, 4)


def drawn(config):
    msrun.init({"seed": 3} | config).shard(build("mlp"))
    return tuple(torch.rand(3).tolist())


STAGES = {"stages": {"fc1": 0, "fc2": 0, "fc3": 1}, "microbatches": 2}


def test_stages_draw_apart_and_what_shares_a_layer_alike():
    apart = run_warm(drawn, 4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": STAGES})
    plan = [{"match": "fc1", "style": "colwise"}]
    alike = run_warm(drawn, 4, {"mesh": {"pp": 2, "tp": 2}, "pipeline": STAGES, "plan": plan})

    assert len(set(apart)) == 4
    assert (alike[0], alike[2]) == (alike[1], alike[3])
    assert alike[0] != alike[2]
    assert apart[0] == alike[0] == run_warm(drawn, 1, {})[0]


def refused(config, model):
    runtime = msrun.init(config)
    network = build(model)
    before = {name: id(param) for name, param in network.named_parameters()}
    with pytest.raises(msrun.errors.UsageError) as caught:
        runtime.shard(network)
    assert before == {name: id(param) for name, param in network.named_parameters()}
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "model", "sentence"),
    [
        (
            {"accumulate": 2},
            "conv",
            "parallel.accumulate: with 2 micro-batches norm1 sees one of them at a time",
        ),
        (
            {"reduce": {"exclude": ["fc4.*"]}},
            "mlp",
            "parallel.reduce.exclude: 'fc4.*' matches nothing (choose such as ",
        ),
        (
            {"recompute": {"modules": ["layer.*"]}},
            "mlp",
            "parallel.recompute.modules: 'layer.*' matches nothing (choose such as fc1, fc2, fc3)",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_changes(config, model, sentence):
    for found in run_warm(refused, 2, config, model):
        assert found.startswith(sentence)


def torchs_own():
    """Train with the batch norms that torch synchronizes itself, on accelerators alone."""
    runtime = msrun.init()
    network = runtime.shard(nn.SyncBatchNorm.convert_sync_batchnorm(build("conv")))
    update = OPTIMIZERS["sgd"](network.parameters())
    return [
        runtime.step(
            network, update, functional.cross_entropy, *(t.chunk(2)[runtime.rank] for t in batch)
        ).item()
        for batch in batches("conv")
    ]


def test_batch_norms_that_torch_synchronizes_work_too():
    assert_equal_curves(run_warm(torchs_own, 2), oracle("conv"))


def local_statistics():
    runtime = msrun.init({"accumulate": 2, "batch_norm": "local"})
    network = runtime.shard(build("conv"))
    x, y = batches("conv")[0]
    return runtime.step(
        network, OPTIMIZERS["sgd"](network.parameters()), functional.cross_entropy, x, y
    ).item()


def test_local_batch_norms_are_a_choice():
    assert math.isfinite(run_warm(local_statistics, 2)[0])


def wrong_order():
    runtime = msrun.init({"optimizer": {"zero": 3}})
    network = build("mlp")
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    runtime.shard(network)
    with pytest.raises(msrun.errors.UsageError) as caught:
        runtime.optimizer(update)
    with pytest.raises(msrun.errors.UsageError) as other:
        runtime.step(nn.Linear(1, 1), update, functional.mse_loss, torch.ones(1), torch.ones(1))
    return caught.value.message, other.value.message


def test_an_optimizer_of_replaced_parameters_is_refused():
    assert run_warm(wrong_order, 2)[0] == (
        "SGD holds parameters from before rt.shard",
        "Linear is not a model of rt.shard",
    )
