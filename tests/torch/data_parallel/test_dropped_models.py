"""What is left of a sharded model that a script drops: nothing."""

import gc
import os
import time
import weakref
from pathlib import Path

import pytest
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm

import msrun
from msrun.errors import UsageError
from msrun.parallel.torch_compat import is_watched

pytestmark = pytest.mark.torch

THREADS = Path("/proc/self/task")
PATIENCE = 10  # a thread that was joined is still listed until the kernel has ended it


def names_of_new_threads(before):
    """Return the names of threads that stay beside those of `before`."""
    deadline = time.monotonic() + PATIENCE
    while (new := {*THREADS.iterdir()} - before) and time.monotonic() < deadline:
        os.sched_yield()
    return sorted(each.joinpath("comm").read_text().strip() for each in new)


def left_behind(config):
    """Train a model and drop it; return whether its weights are left, and the new threads."""
    threads = {*THREADS.iterdir()}
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    weight = weakref.ref(next(network.parameters()))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    runtime.step(network, update, MODELS["mlp"][1], *batches("mlp")[0])
    runtime.barrier()
    runtime.close()
    del runtime, network, update
    gc.collect()
    return weight() is not None, names_of_new_threads(threads)


@pytest.mark.parametrize("config", [{}, {"accumulate": 2}])
def test_a_model_that_is_dropped_leaves_no_memory_and_no_group(config):
    run_warm(left_behind, 2, config)  # torch's autograd starts a thread that stays

    assert run_warm(left_behind, 2, config) == [(False, [])] * 2


def dropped_alone(config):
    """Return whether the weights of a model that is dropped are left beside its runtime."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    reference = weakref.ref(network)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    x, y = batches("mlp")[0]
    runtime.step(network, update, MODELS["mlp"][1], x, y)
    MODELS["mlp"][1](network(x), y).backward()
    update.step()
    del network, update
    gc.collect()
    is_left = reference() is not None
    runtime.close()
    return is_left


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_model_that_is_dropped_while_its_runtime_goes_on_is_freed(level):
    assert run_warm(dropped_alone, 2, {"optimizer": {"zero": level}}) == [False] * 2


def train_after_close():
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    runtime.barrier()
    runtime.close()
    del runtime
    gc.collect()
    x, y = batches("mlp")[0]
    loss = MODELS["mlp"][1](network(x), y)
    with pytest.raises(UsageError) as caught:
        loss.backward()
    return caught.value.message, is_watched()


def test_a_backward_pass_after_the_runtime_is_refused_and_nothing_looks_at_it():
    sentence = "the runtime that reduces the gradients of this model was closed"
    assert run_warm(train_after_close, 2) == [(sentence, False)] * 2
