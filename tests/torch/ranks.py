"""Ranks for tests: forked from a parent that has torch loaded, so that four cost a moment.

A test passes a module-level function; each rank calls it inside a gloo group of its own and the
test gets what they return, by rank.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
from torch import nn
from torch.distributed import device_mesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import msrun

# What ranks would import, each for itself.
import msrun.parallel.checkpoint.api
import msrun.parallel.data
import msrun.parallel.data_parallel.collective_order
import msrun.parallel.data_parallel.zero
import msrun.parallel.deferred.fill
import msrun.parallel.pipeline.model
import msrun.parallel.preload
import msrun.parallel.runtime
import msrun.parallel.tensor.hooks
from msrun.supervise.process import die_with_parent

TIMEOUT = 60.0
# Longer than that ranks may take for what they waited for a core, on a machine that is busy
# otherwise; pytest gives up after 120 s.
WAITED_MAX = 45.0
WAITING = "warm rank"
STEPS = 5
BATCH = 16


def run_ranks(function, world_size, *args, timeout=TIMEOUT):
    """Return what `function(*args)` returned on each of `world_size` ranks.

    A rank that fails, or does not return in time, fails the test with the tracebacks of all.
    """
    ranks = Ranks(world_size)
    try:
        return ranks.call(function, args, timeout)
    finally:
        ranks.end()


def run_warm(function, world_size, *args, timeout=TIMEOUT):
    """Return the same from ranks that stay for the next test, and so do torch's caches.

    They are those of a job in which one program runs after the other: what `function` changes
    beside directory, environment, warnings and random numbers, it changes back.  After a failure
    the next test gets new ones.
    """
    ranks = _warm.pop(world_size, None) or Ranks(world_size)
    try:
        found = ranks.call(function, args, timeout)
    except BaseException:
        ranks.end()
        raise
    _warm[world_size] = ranks
    return found


def end_warm():
    """End the ranks that wait for the next test."""
    while _warm:
        _warm.popitem()[1].end()


_warm: dict[int, Ranks] = {}
# Else the end of a program that uses them would wait for those that are stopped.
atexit.register(end_warm)


class Ranks:
    """Processes in one gloo group that call one function after the other."""

    def __init__(self, world_size):
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            place = (rank, world_size)
            process = context.Process(
                target=_rank, args=(os.getpid(), place, f"{self._folder.name}/store", there)
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, function, args, timeout):
        """Return what each rank returned; when one did not, the test fails."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, args, _surroundings()))
        answers = _collect(self._pipes, timeout, self._waited)
        # Idle threads of gloo wake a hundred times a second, in every group of every rank.
        self._signal(signal.SIGSTOP)
        failed = [f"rank {rank}: {text}" for rank, (is_ok, text) in enumerate(answers) if not is_ok]
        if failed:
            pytest.fail("\n".join(failed))
        return [value for _, value in answers]

    def _waited(self):
        """Return the seconds that all ranks were ready to run, and had no core."""
        waited = 0
        for process in self._processes:
            with contextlib.suppress(OSError):  # it has ended
                waited += int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1])
        return waited / 1e9

    def _signal(self, number):
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def end(self):
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()


def _collect(pipes, timeout, waited):
    """Return one answer of each rank; after a failure the others get little more time.

    The time in which ranks are ready to run and have no core, which `waited` tells, does not count:
    of two ranks at the lowest priority beside six busy processes, 60 s are less than one of work.
    A rank that hangs is not ready to run.
    """
    answers = [None] * len(pipes)
    before, limit = waited(), time.monotonic() + timeout
    while None in answers:
        left = limit + min(waited() - before, WAITED_MAX) - time.monotonic()
        if left <= 0:
            break
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if answers[rank] is None}
        for pipe in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting[pipe]
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                answers[rank] = (False, "died without a word")
            if not answers[rank][0]:
                limit = min(limit, time.monotonic() + 2)
    return [answer or (False, "did not return in time") for answer in answers]


def _surroundings():
    """Return what a process that is forked now would find around it."""
    return Path.cwd(), dict(os.environ), warnings.filters


def _enter(surroundings, place):
    """Make this rank one that was forked in these surroundings."""
    folder, environ, filters = surroundings
    rank, world_size = place
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(
        environ,
        GLOO_SOCKET_IFNAME="lo",  # here alone: programs of other tests run on hosts of a lab
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    warnings.resetwarnings()
    warnings.filters.extend(filters)
    # As in a job, no two ranks draw the same numbers unless something sees to it.
    torch.manual_seed(1000 + rank)
    random.seed(1000 + rank)


def _rank(parent, place, store, pipe):
    rank, world_size = place
    die_with_parent(parent)  # a stopped one would not see that the pipe is closed
    # By this name the check for processes that a test left behind knows it.
    Path("/proc/self/comm").write_text(WAITING)
    gc.freeze()  # a look at all objects of the parent would copy them
    torch.set_num_threads(1)
    _share_groups()
    for number in itertools.count():
        function, args, surroundings = pipe.recv()
        try:
            _enter(surroundings, place)
            if number == 0:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, world_size),
                    rank=rank,
                    world_size=world_size,
                )
                dist.barrier()  # one that leaves while a peer still connects fails it
            answer = (True, function(*args))
        except BaseException:  # noqa: BLE001 - the test prints it
            answer = (False, traceback.format_exc())
        # Peers may still talk to this one: the parent ends all when it has all answers.
        pipe.send(answer)
        if msrun.parallel.runtime._current is not None:
            msrun.init().close()


def _share_groups():
    """Let meshes that have a group in common share it: gloo's idle threads wake 100 times a second.

    Also names of groups that caches of torch remember then stay true.  Groups of ranks that are not
    there, whose backend is `fake`, end with them.
    """
    make, made = device_mesh.new_group, {}

    def new_group(ranks, **options):
        if dist.get_backend() == "fake":
            return make(ranks, **options)
        if tuple(ranks) not in made:
            made[tuple(ranks)] = make(ranks, **options)
        return made[tuple(ranks)]

    device_mesh.new_group = new_group


class Counted(TorchDispatchMode):
    """Counts collectives and the bytes of their largest tensor, by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        if "c10d" in func.namespace:
            name = func.name().partition("::")[2].partition(".")[0]
            if name not in ("wait_tensor", "_wrap_tensor_autograd", "barrier"):
                tensors = [t for t in _leaves(args) if isinstance(t, torch.Tensor)]
                self.calls[name] += 1
                self.bytes[name] += max((t.nbytes for t in tensors), default=0)
        return func(*args, **(kwargs or {}))


def _leaves(value):
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 32)
        self.fc3 = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))


class ConvNet(nn.Module):
    """Convolutions and batch norms over 1 x 8 x 8 images, given as 64 numbers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        x = functional.relu(self.norm1(self.conv1(x.view(-1, 1, 8, 8))))
        x = functional.relu(self.norm2(self.conv2(x)))
        return self.head(x.flatten(1))


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def attend(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A causal language model whose head is its embedding."""

    def __init__(self, *, layers=2, vocabulary=32, width=16, heads=4, length=8, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        # Losses near ln(vocabulary), where a rounding is far below the tolerance.
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_loss(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


MODELS = {
    "mlp": (MLP, functional.cross_entropy),
    "conv": (ConvNet, functional.cross_entropy),
    "transformer": (Transformer, token_loss),
}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.003),
}


def batches(model, size=BATCH, steps=STEPS):
    """Return the global batches that every rank count trains on."""
    random_numbers = torch.Generator().manual_seed(7)
    found = []
    for _ in range(steps):
        if model == "transformer":
            tokens = torch.randint(0, 32, (size, 9), generator=random_numbers)
            found.append((tokens[:, :-1], tokens[:, 1:]))
        else:
            width = 64 if model == "conv" else 16
            x = torch.randn(size, width, generator=random_numbers)
            found.append((x, torch.randint(0, 10, (size,), generator=random_numbers)))
    return found


def build(model, **options):
    """Return a model whose weights are the same wherever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[model][0](**options)


def train_built_on_meta(config, *arguments):
    """Train a model that has no memory before it is divided."""
    return train(config, *arguments, is_on_meta=True)


def train(config, model="mlp", optimizer="sgd", max_norm=None, *, is_on_meta=False):
    """Train under `config` on this rank's parts; return the losses."""
    runtime = msrun.init(config)
    with runtime.init_on_meta() if is_on_meta else contextlib.nullcontext():
        network = build(model)
    assert {param.is_meta for param in network.parameters()} == {is_on_meta}
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS[optimizer](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for x, y in batches(model):
        part = [t.chunk(count)[share] for t in (x, y)]
        loss = runtime.step(network, update, MODELS[model][1], *part, max_norm=max_norm)
        losses.append(loss.item())
    return losses


def _train_each(cases):
    """Train every case; return the losses by name.

    All in one process group: torch remembers groups by name beyond their end.
    """
    found = {}
    for name, arguments in cases.items():
        try:
            found[name] = train(*arguments)
        except Exception:  # noqa: BLE001 - the test prints it
            # The peers may be anywhere: what comes after cannot be believed.
            found[name] = traceback.format_exc()
            break
        msrun.init().close()
    return found


class Curves:
    """Losses of many cases, those of one number of ranks trained in one go when first asked for.

    Args:
        cases: Name -> ranks, then the arguments of `train`.
        apart: Names of those that are trained in a go of their own.
    """

    def __init__(self, cases, apart=()):
        self._cases = cases
        self._apart = apart
        self._found = {}

    def __getitem__(self, name):
        go = self._go(name)
        if go not in self._found:
            cases = {n: case[1:] for n, case in self._cases.items() if self._go(n) == go}
            self._found[go] = [dict.fromkeys(cases, "failed with its group")]
            limit = TIMEOUT + 10 * len(cases)
            self._found[go] = run_warm(_train_each, go[0], cases, timeout=limit)
        answers = [of_rank.get(name, "not reached") for of_rank in self._found[go]]
        for rank, losses in enumerate(answers):
            if isinstance(losses, str):
                pytest.fail(f"rank {rank}: {losses}")
        return answers

    def _go(self, name):
        return self._cases[name][0], name in self._apart


def _plain(model, optimizer, max_norm, size):
    network = build(model)
    update = OPTIMIZERS[optimizer](network.parameters())
    losses = []
    for x, y in batches(model, size):
        update.zero_grad()
        loss = MODELS[model][1](network(x), y)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses


@functools.cache
def oracle(model="mlp", optimizer="sgd", max_norm=None, size=BATCH):
    """Return the losses of plain torch in one process on the global batches."""
    return run_warm(_plain, 1, model, optimizer, max_norm, size)[0]


def assert_equal_curves(found, expected, tolerance=1e-6):
    """Every rank reports the expected losses."""
    for rank, losses in enumerate(found):
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        assert worst <= tolerance, f"rank {rank}: {worst:.1e} off\n{losses}\n{expected}"
