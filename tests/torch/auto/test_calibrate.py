"""`msrun calibrate`: a job whose measurements the search takes for its costs."""

import subprocess
import sys

import pytest
import torch
from ranks import run_ranks
from support import PATIENCE, environment

import msrun
from msrun.cli.main import main
from msrun.cli.verbs.calibrate import PROGRAM
from msrun.errors import UsageError
from msrun.parallel.calibrate import fit, hidden_fraction
from msrun.parallel.config_file import load_yaml
from msrun.parallel.search.cost.cost import collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import parse_topology

pytestmark = pytest.mark.torch


def test_what_was_measured_is_what_the_search_calculates_with(finished, tmp_path, capsys):
    job = finished(tmp_path, "--workers-per-node", 2, "-m", PROGRAM, "t.yaml")

    assert job.process.returncode == 0
    found = parse_topology(load_yaml(tmp_path / "t.yaml"))
    assert found.per_node == 2
    assert found.flops > 1e8
    assert 0 <= found.overlap < 1
    assert "overlap:" in (tmp_path / "t.yaml").read_text()
    assert {(one.kind, one.ranks, one.across) for one in found.measured} == {
        (kind, 2, False) for kind in ("gather", "scatter", "reduce", "move")
    }
    by_kind = {one.kind: one for one in found.measured}
    for kind in (MoveKind.GATHER, MoveKind.SCATTER, MoveKind.REDUCE, MoveKind.MOVE):
        one = by_kind[kind.name.lower()]
        assert collective(kind, found.wires((2,))[0]) == (one.start, one.per_byte)

    model = tmp_path / "calibrated_net.py"
    model.write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(8, 8), (torch.ones(4, 8),)\n"
    )
    words = [f"{model}:make", "--world", "2", "--mesh", "dp=2"]
    assert main(["search", *words, "--topology", str(tmp_path / "t.yaml")]) == 0
    assert "ranks      2 (calibrated)\n" in capsys.readouterr().out
    sys.modules.pop("calibrated_net", None)


def test_nothing_is_written_where_it_cannot_be(finished, tmp_path):
    job = finished(tmp_path, "--workers-per-node", 1, "-m", PROGRAM, "none/t.yaml")

    assert job.process.returncode == 1
    assert "none/t.yaml cannot be written: No such file or directory" in job.log(0)


def test_the_verb_starts_the_job(tmp_path):
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    words = ["calibrate", "--workers-per-node", "1", "--log-dir", "logs", "-o", "one.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "msrun", *words],
        cwd=tmp_path,
        env=environment(runtime),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("see one.yaml\n")
    found = parse_topology(load_yaml(tmp_path / "one.yaml"))
    assert found.measured == ()


@pytest.mark.parametrize(
    ("first", "second", "both", "share"),
    [(2.0, 2.0, 4.0, 0.0), (2.0, 4.0, 5.0, 0.5), (2.0, 2.0, 5.0, 0.0), (2.0, 2.0, 1.0, 0.95)],
)
def test_what_two_times_save_together(first, second, both, share):
    assert hidden_fraction(first, second, both) == share


def with_topology(path):
    """Return the words of the refusal, or None when a plan was found."""
    runtime = msrun.init({"mode": "auto", "mesh": {"dp": 2}, "topology": path})
    try:
        runtime.shard(torch.nn.Linear(4, 4), sample=(torch.ones(2, 4),))
    except UsageError as error:
        return error.message
    return None


def test_training_takes_it_too(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("preset: cpu\nlaunch: 1e-6\n")

    assert run_ranks(with_topology, 2, str(path)) == [None, None]
    missing = f"parallel.topology: {tmp_path}/none.yaml cannot be read: No such file or directory"
    assert run_ranks(with_topology, 2, str(tmp_path / "none.yaml")) == [missing] * 2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([3.0, 5.0, 9.0], (1.0, 2.0)),
        ([1.0, 1.0, 1.0], (1.0, 0.0)),
        ([0.1, 2.0, 4.0], None),
    ],
)
def test_a_start_and_a_rate_that_go_through_what_was_measured(seconds, expected):
    start, per_byte = fit([1, 2, 4], seconds)

    assert start >= 0
    assert per_byte >= 0
    if expected is not None:
        assert (start, per_byte) == pytest.approx(expected, abs=1e-9)
