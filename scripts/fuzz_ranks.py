"""Forked processes that wait for cases of scripts/fuzz_models.py, one gloo group for each size."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

LIMIT = 60.0
_RECYCLE = 40


class FuzzRanks:
    """Processes in one gloo group, made anew after a failure.

    Args:
        attempt: Called in each rank with a case; returns its answer.
        worst: Returns one answer for those of all ranks.
    """

    def __init__(self, attempt: Callable[[Any], str], worst: Callable[[list[str]], str]) -> None:
        self._attempt, self._worst = attempt, worst
        self._pipes: dict[int, list[Any]] = {}
        self._processes: dict[int, list[Any]] = {}
        self._counts: Counter[int] = Counter()
        self._folder = tempfile.TemporaryDirectory()
        self._number = 0

    def ask(self, case: Any, size: int, limit: float = LIMIT) -> str:
        """Return what a case comes to."""
        if self._counts[size] >= _RECYCLE:
            self.end(size)
        if size not in self._pipes:
            self._start(size)
        self._counts[size] += 1
        for pipe in self._pipes[size]:
            pipe.send(case)
        answers = _collect(self._pipes[size], limit)
        found = self._worst(answers)
        if len({answer.partition(":")[0] for answer in answers}) > 1 or not found.startswith(
            ("equal", "ran", "invalid", "refused", "warned")
        ):
            self.end(size)
        return found

    def _start(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._number += 1
        self._pipes[size], self._processes[size] = [], []
        for rank in range(size):
            here, there = context.Pipe()
            store = f"{self._folder.name}/{self._number}"
            process = context.Process(
                target=_rank, args=(self._attempt, (rank, size), store, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes[size].append(here)
            self._processes[size].append(process)

    def end(self, size: int) -> None:
        """End the ranks of a group."""
        for process in self._processes.pop(size, []):
            process.kill()
            process.join()
        self._pipes.pop(size, None)
        self._counts[size] = 0

    def close(self) -> None:
        """End all ranks."""
        for size in list(self._processes):
            self.end(size)
        self._folder.cleanup()


def _rank(attempt: Callable[[Any], str], place: tuple[int, int], store: str, pipe: Any) -> None:
    rank, world_size = place
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    _share_groups()
    torch_distributed: Any = dist  # its stub lacks the store
    dist.init_process_group(
        "gloo",
        store=torch_distributed.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
    )
    dist.barrier()
    while True:
        pipe.send(" ".join(attempt(pipe.recv()).split()))


def _share_groups() -> None:
    """Let meshes that have a group in common share it: threads of gloo are many."""
    mesh: Any = device_mesh
    make, made = mesh.new_group, {}

    def new_group(ranks: Any, **options: Any) -> Any:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = make(ranks, **options)
        return made[tuple(ranks)]

    mesh.new_group = new_group


def _collect(pipes: list[Any], limit: float) -> list[str]:
    answers: dict[int, str] = {}
    deadline = time.monotonic() + limit
    while len(answers) < len(pipes) and time.monotonic() < deadline:
        waiting: list[Any] = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        left = max(0.0, deadline - time.monotonic())
        for pipe in multiprocessing.connection.wait(waiting, left):
            rank = pipes.index(pipe)
            try:
                answers[rank] = pipes[rank].recv()
            except (EOFError, OSError):
                answers[rank] = "traceback: the process died"
            if not answers[rank].startswith(("equal", "ran", "invalid", "warned")):
                deadline = min(deadline, time.monotonic() + 10)
    return [answers.get(rank, "hung") for rank in range(len(pipes))]
