"""`rt.loader`: every sample once an epoch, by mesh coordinate, resumable anywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import assert_equal_curves, build, run_warm
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import msrun
from msrun.errors import UsageError
from msrun.parallel.data import EpochSplit

pytestmark = pytest.mark.torch

sizes = st.integers(1, 9)


@given(st.integers(1, 200), sizes, sizes, st.booleans())
def test_parts_are_every_sample_once_in_order(samples, batch_size, ranks, drop_last):
    cut = EpochSplit(samples=samples, batch_size=batch_size, ranks=ranks, drop_last=drop_last)
    read = [
        position
        for batch in range(cut.batches)
        for rank in range(ranks)
        for position in cut.part(batch, rank)
    ]
    kept = samples - samples % (batch_size * ranks) if drop_last else samples

    assert read == list(range(kept))
    for batch in range(cut.batches):
        lengths = [len(cut.part(batch, rank)) for rank in range(ranks)]
        assert max(lengths) - min(lengths) <= 1
        assert sum(lengths) == cut.size(batch)


def numbers(count=22):
    return TensorDataset(torch.arange(count))


def read(config, options, epochs):
    loader = msrun.init(config).loader(numbers(), 4, **options)
    return [[batch.tolist() for (batch,) in loader] for _ in range(epochs)], len(loader)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "num_workers": 2}])
def test_ranks_share_each_global_batch(options):
    alone, _ = run_warm(read, 1, {}, options, 2)[0]
    found = run_warm(read, 2, {}, options, 2)

    for epoch in range(2):
        for batch, (first, second) in enumerate(
            zip(found[0][0][epoch], found[1][0][epoch], strict=True)
        ):
            both = [n for part in alone[epoch][2 * batch : 2 * batch + 2] for n in part]
            assert first + second == both
    assert found[0][1] == 3
    assert (alone[0] != alone[1]) == bool(options)


def test_tensor_parallel_ranks_read_the_same():
    config = {"mesh": {"dp": 2, "tp": 2}, "mode": "manual"}
    found = run_warm(read, 4, config, {"shuffle": True, "seed": 3}, 1)

    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


def stopped(resumed_ranks_batch):
    """Read two epochs, taking the state after each batch."""
    loader = msrun.init().loader(numbers(), resumed_ranks_batch, shuffle=True)
    batches, states = [], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for (batch,) in loader:
            batches.append(batch.tolist())
            states.append(loader.state_dict())
    return batches, states


def go_on(state, batch_size):
    loader = msrun.init().loader(numbers(), batch_size, shuffle=True, seed=9)
    loader.load_state_dict(state)
    batches = []
    for epoch in range(state["epoch"], 2):
        loader.set_epoch(epoch)
        batches += [batch.tolist() for (batch,) in loader]
    return batches


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_goes_on_after_any_batch_on_any_number_of_ranks(world_size):
    (first, states), (second, _) = run_warm(stopped, 2, 4)
    whole = [sorted(a + b) for a, b in zip(first, second, strict=True)]

    for index in (0, 1, 3, 4):
        found = run_warm(go_on, world_size, states[index], 8 // world_size)
        parts = [sorted(n for part in parts for n in part) for parts in zip(*found, strict=True)]
        assert parts == whole[index + 1 :]


def refused(options):
    with pytest.raises(UsageError) as caught:
        msrun.init().loader(**options)
    return caught.value.message


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"dataset": numbers(9), "batch_size": 4},
            "rt.loader: the last batch has 1 of 9 samples, fewer than the 2 data-parallel ranks",
        ),
        (
            {"dataset": numbers(5), "batch_size": 4, "drop_last": True},
            "rt.loader: 5 samples are no batch of 4 for each of 2 ranks",
        ),
        ({"dataset": numbers(), "batch_size": 0}, "rt.loader: batch_size 0 must be at least 1"),
        (
            {"dataset": numbers(), "batch_size": 1, "sampler": [0]},
            "rt.loader: it makes its own sampler, which gives each rank its part of a batch",
        ),
        (
            {"dataset": numbers(), "batch_sampler": [[0, 1], [2, 3]]},
            "rt.loader: it makes its own batch_sampler, which gives each rank its part of a batch",
        ),
        (
            {"dataset": numbers()},
            "rt.loader: batch_size is None, and must be the number of samples of one rank",
        ),
        (
            {"dataset": DataLoader(numbers()), "batch_size": 1},
            "rt.loader: it was given a DataLoader, and makes its own",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(options, sentence):
    assert all(found.startswith(sentence) for found in run_warm(refused, 2, options))


def other_batch(state):
    loader = msrun.init().loader(numbers(), 3)
    with pytest.raises(UsageError) as caught:
        loader.load_state_dict(state)
    return caught.value.message


def test_a_place_within_a_batch_is_refused():
    assert run_warm(other_batch, 2, {"epoch": 0, "samples": 8, "seed": 0})[0] == (
        "the loader stopped after 8 samples, which is no multiple of the global batch of 6"
    )


def learned(config):
    """Train two epochs over 22 samples in global batches of 8, so the last has 6."""
    runtime = msrun.init(config)
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(22, 16, generator=generator), torch.randint(0, 10, (22,), generator=generator)
    )
    network = runtime.shard(build("mlp"))
    update = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    loader = runtime.loader(data, 8 // runtime.layout.size("dp"), shuffle=True)
    return [
        runtime.step(network, update, functional.cross_entropy, x, y).item()
        for _ in range(2)
        for x, y in loader
    ]


@pytest.mark.parametrize(
    "config", [{}, {"accumulate": 2}, {"optimizer": {"zero": 1}, "accumulate": 2}]
)
def test_an_uneven_last_batch_counts_each_sample_once(config):
    alone = run_warm(learned, 1, {})[0]
    # Its 6 samples are 2, 2, 1 and 1 on four ranks, and 3 and 3 on two.
    for world_size in (2, 4) if config == {} else (2,):
        assert_equal_curves(run_warm(learned, world_size, config), alone)


def weights(inner):
    """Return the weights that a loop reads, in whose batches another loop runs."""
    rt = msrun.init({})
    outer, other = rt.loader(numbers(6), 2), rt.loader(numbers(7), 2)
    held = iter(other)
    found, inside = [], []
    for (batch,) in outer:
        if inner == "evaluation":
            inside = [rt.batch_weight for _ in other]
        elif inner == "left early":
            for _ in other:
                break
        elif inner == "held":
            next(held, None)
            rt.context.batch.choose([batch])
        found.append(rt.batch_weight)
        ended = rt.context.batch.end
    return found, inside, ended.least, rt.batch_weight if inner != "held" else 1.0


@pytest.mark.parametrize("inner", ["", "evaluation", "left early", "held"])
def test_a_loop_inside_of_another_leaves_its_weights_alone(inner):
    # The last 2 of 6 samples are 1 on each of 2 ranks; the last 3 of 7 are 2 and 1.
    for rank, (found, inside, least, after) in enumerate(run_warm(weights, 2, inner)):
        assert found == [1.0, 1.0]
        assert (least, after) == (1, 1.0)
        assert inside == ([1.0, [4 / 3, 2 / 3][rank]] if inner == "evaluation" else [])


def learned_beside_evaluation(is_evaluated):
    """Return the losses of steps over an uneven epoch, perhaps with an evaluation in each."""
    rt = msrun.init({})
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(22, 16, generator=generator), torch.randint(0, 10, (22,), generator=generator)
    )
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for x, y in rt.loader(data, 8 // rt.layout.size("dp")):
        if is_evaluated:
            for a, b in rt.loader(data, 8 // rt.layout.size("dp")):
                with torch.no_grad():
                    rt.mean_over_data(functional.cross_entropy(network(a), b))
        losses.append(rt.step(network, update, functional.cross_entropy, x, y).item())
    return losses


def test_an_evaluation_in_an_uneven_last_batch_changes_no_step():
    alone = run_warm(learned_beside_evaluation, 1, "")[0]
    assert_equal_curves(run_warm(learned_beside_evaluation, 4, "evaluated"), alone)


def learned_by_hand(config, is_weighted, drop_last):
    """Train as `learned`, in a plain loop; return the refusal if there is one."""
    runtime = msrun.init(config)
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(22, 16, generator=generator), torch.randint(0, 10, (22,), generator=generator)
    )
    network = runtime.shard(build("mlp"))
    update = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    options = {"shuffle": True, "drop_last": drop_last}
    loader = runtime.loader(data, 8 // runtime.layout.size("dp"), **options)
    losses = []
    for x, y in (batch for _ in range(2) for batch in loader):
        loss = functional.cross_entropy(network(x), y)
        update.zero_grad()
        try:
            (loss * runtime.batch_weight if is_weighted else loss).backward()
        except UsageError as error:
            return error.message, len(losses)
        update.step()
        losses.append(runtime.mean_over_data(loss).item())
    return losses


ZERO = {"optimizer": {"zero": 3}}


@pytest.mark.parametrize("config", [{}, ZERO])
@pytest.mark.parametrize(("is_weighted", "drop_last"), [(True, False), (False, True)])
def test_a_plain_loop_counts_each_sample_once(config, is_weighted, drop_last):
    alone = run_warm(learned_by_hand, 1, {}, is_weighted, drop_last)[0]

    assert_equal_curves(run_warm(learned_by_hand, 4, config, is_weighted, drop_last), alone)


@pytest.mark.parametrize("config", [{}, ZERO])
def test_a_plain_loop_without_weights_is_refused_at_its_first_step(config):
    problem = (
        "the last batch of rt.loader has unlike numbers of samples on the ranks, and this loop "
        "takes the mean of ranks"
    )
    assert run_warm(learned_by_hand, 4, config, 0, 0) == [(problem, 0)] * 4


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x, y):
        return functional.cross_entropy(self.down(self.up(x)), y)


def refused_at_once(config, samples, batch_size, returns_loss):
    """Return what refuses a loop, and after how many steps; None if nothing does."""
    runtime = msrun.init(config)
    torch.manual_seed(7)  # stages read the same data
    data = TensorDataset(torch.randn(samples, 16), torch.randint(0, 10, (samples,)))
    network = WithLoss() if returns_loss else build("mlp")
    sample = data[:batch_size] if returns_loss else data[:batch_size][:1]
    network = runtime.shard(network, sample=sample)
    update = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for steps, (x, y) in enumerate(runtime.loader(data, batch_size)):
        try:
            if returns_loss:
                runtime.step(network, update, (x, y))
            else:
                runtime.step(network, update, functional.cross_entropy, x, y)
        except UsageError as error:
            return error.message, steps
    return None


LAST = "the last batch of rt.loader has {} sample(s) on some rank, which do not fit "
PP = {"stages": {"up": 0, "down": 1}, "microbatches": 2}


@pytest.mark.parametrize(
    ("config", "samples", "returns_loss", "sentence"),
    [
        ({"accumulate": 4}, 22, False, "accumulate: " + LAST.format(3) + "4 micro-batches"),
        ({"accumulate": 2}, 17 + 3, False, None),
        (
            {"mode": "auto", "mesh": {"dp": 2}},
            22,
            False,
            "mode: auto: " + LAST.format(3) + "a plan for batches of 8 on each rank",
        ),
        (
            {"mesh": {"pp": 2}, "pipeline": PP},
            11,
            True,
            "pipeline.microbatches: "
            + LAST.format(3)
            + "2 equal parts, as a model that returns its loss needs",
        ),
        ({"mesh": {"pp": 2}, "pipeline": PP}, 12, True, None),
    ],
)
def test_a_last_batch_that_no_step_could_run_is_refused_in_the_first(
    config, samples, returns_loss, sentence
):
    expected = sentence and (f"parallel.{sentence}", 0)
    assert run_warm(refused_at_once, 2, config, samples, 8, returns_loss) == [expected] * 2


def read_by_another():
    """Make a loader of the sampler of ours, as Accelerator.prepare does."""
    ours = msrun.init().loader(numbers(), 4)
    theirs = DataLoader(ours.dataset, batch_sampler=ours.batch_sampler)
    assert len(next(iter(ours))[0]) == 4
    try:
        return [batch.tolist() for (batch,) in theirs]
    except UsageError as error:
        return error.message


def test_another_loader_does_not_divide_the_part_of_a_rank_again():
    sentence = "another loader reads the batches of rt.loader, which are this rank's part already"
    assert run_warm(read_by_another, 2) == [sentence] * 2


def test_in_one_process_another_loader_reads_all():
    found = run_warm(read_by_another, 1)[0]
    assert [n for batch in found for n in batch] == list(range(22))
