"""`precision` over the axis `ep`: experts round as in one process, and rows travel narrow."""

import functools

import lists  # noqa: F401 - adds models of lists
import pytest
import torch
from mixtures import CHOICES, EXPERTS, LENGTH, ROWS, RULE, WIDTH, build, texts, token_loss
from ranks import Counted, run_warm
from reduced import assert_as_near, learned, plain
from test_experts import CONFIGS

import msrun

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    # Some samples choose no expert, and all of a part may be such.
    pytest.mark.filterwarnings("ignore:msrun. some parts of the batch"),
]

# Of every way in which a call may have no rows, or rows of another type.
NAMES = (
    *("top 2", "crowded", "capacity"),
    *("list", "list, finished", "list, crowded", "list, lonely", "list, weighted"),
)


def on_ranks(config, names):
    """Return what ranks learn of each model."""
    return {name: learned(config, build(name), texts(3), token_loss) for name in names}


@functools.cache
def alone(precision, name):
    return plain(precision, build(name), texts(3), token_loss)


@functools.cache
def with_whole_experts(precision, names):
    """Return what ranks learn that have all experts, and gather parameters in that type."""
    config = {"optimizer": {"zero": 3}, "precision": precision}
    return run_warm(on_ranks, 4, config, names)[0]


def check(precision, names, case):
    ranks, options = CONFIGS[case]
    config = {"plan": [RULE], **options, "precision": precision}
    for of_rank in run_warm(on_ranks, ranks, config, names, timeout=200):
        for name, found in of_rank.items():
            others = [alone(precision, name)]
            if "optimizer" in options:
                others.append(with_whole_experts(precision, names)[name])
            assert_as_near(found, alone(None, name), *others)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["dp and ep", "zero 3"])
def test_experts_round_as_one_process_does(case):
    check("bf16", ("top 2", "list, after", "list, lonely"), case)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", CONFIGS)
def test_experts_of_all_kinds_round_as_one_process_does(case, precision):
    check(precision, NAMES, case)


def sent(config, name):
    """Return the bytes of all-to-alls in the second step; the first one tries a list."""
    with msrun.init(config) as rt:
        model = rt.shard(build(name))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        share, count = rt.coordinate["dp"], rt.layout.size("dp")
        for batch in texts(2):
            with Counted() as counted:
                part = [tensor.chunk(count)[share] for tensor in batch]
                rt.step(model, optimizer, token_loss, *part)
        return counted.bytes["all_to_all_single"]


@pytest.mark.parametrize("name", ["top 2", "list"])
def test_rows_travel_in_the_type_of_their_product(name):
    layers, passes, ranks = 2, 2, 2
    pairs = ROWS * LENGTH * CHOICES
    config = {"mesh": {"ep": ranks}, "plan": [RULE]}
    told = sum(run_warm(sent, ranks, config, name))
    found = sum(run_warm(sent, ranks, {**config, "precision": "bf16"}, name))
    rows = layers * passes * 2 * pairs * WIDTH  # there and back
    weights = layers * passes * pairs if name == "top 2" else 0  # of the router, narrow as its gate
    assert told - found == 2 * rows + 2 * weights
    assert EXPERTS % ranks == 0
