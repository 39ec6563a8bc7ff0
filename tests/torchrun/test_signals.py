"""`--signals-to-handle` beside torchrun: which signals end a job, and what workers get first."""

from __future__ import annotations

import signal

import pytest
from support import script, until

pytestmark = [pytest.mark.torch, pytest.mark.process]

SAVES = """
    import os, signal, sys, time
    name = f"said-{os.environ['RANK']}"
    def save(signum, frame):
        with open(name, "w") as file:
            file.write(signal.Signals(signum).name)
        sys.exit(0)
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, save)
    with open(f".up-{os.environ['RANK']}", "w") as file:
        file.write(os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"])
    os.rename(file.name, file.name[1:])  # in one step: it is read as soon as it is there
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("words", "signum"),
    [
        (["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2"], signal.SIGUSR1),
        (["--signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"], signal.SIGUSR2),
        ([], signal.SIGTERM),
        ([], signal.SIGINT),
    ],
)
@pytest.mark.few(2)
def test_a_named_signal_reaches_the_workers_and_ends_the_job(launch, tmp_path, words, signum):
    program = script(tmp_path, SAVES)
    line = [*words, "--nproc-per-node=2", program]
    sides = [launch(name, line) for name in ("msrun", "torchrun")]
    seen = []
    for side in sides:
        until(lambda side=side: len(list(side.folder.glob("up-*"))) == 2, "for both", seconds=60)
        seen.append((side.folder / "up-0").read_text())
        side.process.send_signal(signum)

    ours, theirs = (side.wait() for side in sides)

    assert [side.written() for side in sides] == [[signum.name] * 2] * 2
    assert ours == 128 + signum  # torchrun has 1
    assert theirs != 0
    expected = words[-1].rpartition("=")[2] if words else "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert set(seen[0].split(",")) >= set(seen[1].split(",")) == set(expected.split(","))


@pytest.mark.slow
def test_a_signal_that_is_not_named_reaches_the_workers_and_ends_nothing(launch, tmp_path):
    """On purpose: torchrun dies of it at once and leaves its workers behind."""
    text = SAVES.replace("sys.exit(0)", "os.environ")
    side = launch("msrun", [script(tmp_path, text)])
    until(lambda: list(side.folder.glob("up-*")), "for the worker")
    side.process.send_signal(signal.SIGUSR1)
    until(lambda: side.written() == ["SIGUSR1"], "for the signal")

    assert side.process.poll() is None
    for _ in range(2):
        side.process.send_signal(signal.SIGTERM)
    assert side.wait() == 143
