"""`rt.loader` of a dataset without a length: global batches are those of one process."""

import pytest
import torch
from ranks import assert_equal_curves, build, run_warm
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

COUNT, GLOBAL = 22, 8


class Stream(IterableDataset):
    """Numbers in an order of the epoch; workers have every n-th."""

    def __init__(self, count=COUNT, seed=0):
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=draw).tolist()
        return iter(order[worker.id :: worker.num_workers] if worker else order)


def read(options, epochs=2):
    rt = msrun.init()
    loader = rt.loader(Stream(), GLOBAL // rt.world_size, **options)
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"num_workers": 2}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_each_global_batch(ranks, options):
    expected = []
    for epoch in range(2):
        stream = Stream()
        stream.set_epoch(epoch)
        whole = DataLoader(stream, GLOBAL, **options)
        expected.append([batch.tolist() for batch in whole])
    found = run_warm(read, ranks, options)

    for epoch in range(2):
        parts = zip(*[of_rank[epoch] for of_rank in found], strict=True)
        assert [[n for part in batch for n in part] for batch in parts] == expected[epoch]
    assert expected[0] != expected[1]


class Pairs(Stream):
    """Inputs and targets."""

    def __iter__(self):
        for number in super().__iter__():
            draw = torch.Generator().manual_seed(number)
            yield torch.randn(16, generator=draw), number % 10


def learned(seed_of_rank=0, by_hand=None, config=None):
    """Train two epochs, whose last batch is uneven; return losses or the refusal."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    loader = rt.loader(Pairs(seed=seed_of_rank * rt.rank), GLOBAL // rt.world_size)
    losses = []
    try:
        for x, y in (batch for _ in range(2) for batch in loader):
            if by_hand is None:
                losses.append(rt.step(network, update, functional.cross_entropy, x, y).item())
                continue
            loss = functional.cross_entropy(network(x), y)
            update.zero_grad()
            (loss * rt.batch_weight if by_hand else loss).backward()
            update.step()
            losses.append(rt.mean_over_data(loss).item())
    except UsageError as error:
        return error.message, len(losses)
    return losses


@pytest.mark.parametrize("by_hand", [None, 1])
def test_an_uneven_end_counts_each_sample_once(by_hand):
    alone = run_warm(learned, 1, 0, by_hand)[0]

    assert len(alone) == 6
    assert_equal_curves(run_warm(learned, 4, 0, by_hand), alone)


def test_a_plain_loop_without_weights_is_refused_at_the_end():
    (sentence, steps), *_ = run_warm(learned, 4, 0, 0)

    assert "the last batch of rt.loader has unlike numbers of samples" in sentence
    assert steps == 2


def test_an_end_that_is_too_short_for_micro_batches_is_refused_on_all_ranks():
    said = (
        "parallel.accumulate: the last batch of rt.loader has 1 sample(s) on some rank, which do "
        "not fit 2 micro-batches"
    )
    assert run_warm(learned, 4, 0, None, {"accumulate": 2}) == [(said, 2)] * 4


def test_ranks_that_read_other_streams_are_refused():
    said = (
        "ranks have other values of the batches of rt.loader (rank 1), which must be equal on all "
        "ranks"
    )
    assert run_warm(learned, 2, 1) == [(said, 0)] * 2


def go_on(state, options):
    rt = msrun.init()
    loader = rt.loader(Stream(), GLOBAL // rt.world_size, **options)
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader], loader.state_dict()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_goes_on_after_any_batch_on_any_number_of_ranks(options):
    whole = run_warm(read, 1, options)[0]

    for done in (1, 2, 3):
        state = {"epoch": 1, "samples": done * GLOBAL, "seed": 0}
        found = run_warm(go_on, 2, state, options)
        parts = zip(*[batches for batches, _ in found], strict=True)
        assert [[n for part in batch for n in part] for batch in parts] == whole[1][done:]
        assert {after["epoch"] for _, after in found} == {2}


def refused(options):
    rt = msrun.init()
    with pytest.raises(UsageError) as caught:
        for _ in rt.loader(**options):
            pass
    return caught.value.message


class Indexed:
    """Has neither a length nor an order."""

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"dataset": Stream(9), "batch_size": 4},
            "the last batch of the stream has 1 sample(s), fewer than the 2 data-parallel ranks",
        ),
        (
            {"dataset": Stream(9), "batch_size": 4, "num_workers": 1},
            "the last batch of the stream has 1 sample(s), fewer than the 2 data-parallel ranks",
        ),
        ({"dataset": Stream(), "batch_size": 0}, "batch_size 0 must be at least 1"),
        (
            {"dataset": Stream(), "batch_size": None},
            "batch_size is None, and must be the number of samples of one rank",
        ),
        (
            {"dataset": Stream(), "batch_size": 4, "shuffle": True},
            "Stream has no length, so rt.loader cannot shuffle it",
        ),
        (
            {"dataset": Stream(), "batch_size": 4, "num_workers": 1, "persistent_workers": True},
            "persistent_workers would begin each epoch of Stream where the first began",
        ),
        ({"dataset": Indexed(), "batch_size": 4}, "Indexed has no length to divide"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, sentence):
    assert run_warm(refused, 2, options) == [f"rt.loader: {sentence}"] * 2


def of_generator():
    return refused({"dataset": (n for n in range(9)), "batch_size": 4})


def test_what_can_be_read_once_is_refused():
    assert run_warm(of_generator, 1) == ["rt.loader: generator can be read once"]
