"""Data parallel: the same losses as one process, and exactly the configured collectives."""

import pytest
from ranks import assert_equal_curves, oracle, run_ranks, train

pytestmark = pytest.mark.torch

DP = {"mesh": {"dp": -1}}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", ["mlp", "conv", "transformer"])
def test_equals_one_process(model, optimizer, world_size):
    found = run_ranks(train, world_size, DP, model, optimizer)

    assert_equal_curves(found, oracle(model, optimizer))
