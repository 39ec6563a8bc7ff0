"""What each backend would run, byte for byte: `REWRITE=1 pytest` writes the files anew."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from launchers.mpirun import Flavour, MpirunLauncher
from launchers.slurm import SlurmLauncher, SlurmOptions
from launchers.ssh import SshLauncher
from msrun.errors import UsageError
from msrun.hosts.hostlist import Host, select

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = (Host(name="node0", slots=8), Host(name="node1", slots=8))


MIXED = (Host(name="node0", slots=8), Host(name="node1", slots=4, user="alice", port=2222))
EVERYTHING = SlurmOptions(
    partition="gpu",
    time="1:00:00",
    account="lab",
    gpus_per_node="a100:8",
    cpus_per_node=64,
    signal_seconds=120,
    requeue=True,
    output="logs/%j.out",
    more=("--exclusive",),
)
PLANS = {
    "ssh": (SshLauncher(), {"hosts": MIXED}),
    "ssh_devices": (
        SshLauncher(("ssh", "-F", "my config")),
        {"hosts": select(MIXED, include="node0:6,7@node1"), "env": {"A": "1"}},
    ),
    **{
        f"mpirun_{flavour.name.lower()}": (
            MpirunLauncher("mpirun", flavour, options=("--verbose",), is_root=True),
            {"hosts": NAMES},
        )
        for flavour in Flavour
    },
    **{
        f"ranks_{flavour.name.lower()}": (
            MpirunLauncher("mpirun", flavour, options=("--verbose",)),
            {"hosts": NAMES, "ranks": 12, "env": {"A": "1"}, "words": ("python", "train.py")},
        )
        for flavour in (Flavour.OPEN_MPI_5, Flavour.MPICH, Flavour.INTEL)
    },
    "mpirun_allocation": (MpirunLauncher("mpirun", Flavour.OPEN_MPI_5), {}),
    "slurm": (SlurmLauncher(), {}),
    "slurm_options": (SlurmLauncher(EVERYTHING), {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_its_golden_file(fleet, render, name):
    launcher, changes = PLANS[name]
    text = render(launcher.plan(replace(fleet, **changes)))
    golden = GOLDEN / f"{name}.txt"

    if os.environ.get("REWRITE"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_golden_file_has_a_plan():
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(PLANS)


@pytest.mark.parametrize(
    ("launcher", "fleet_hosts", "sentence"),
    [
        (SshLauncher(), (), "--launcher ssh needs the hosts"),
        (SlurmLauncher(), NAMES, "--launcher slurm takes the nodes that Slurm gives"),
        (
            MpirunLauncher("mpirun", Flavour.MPICH),
            (Host(name="a", port=22),),
            "host a has port=22, which mpirun is not told",
        ),
        (
            MpirunLauncher("mpirun", Flavour.MPICH),
            (Host(name="a", user="bob"),),
            "host a has user=bob, which mpirun is not told",
        ),
        (
            MpirunLauncher("mpirun", Flavour.MPICH),
            (Host(name="::1"),),
            "host ::1 is an IPv6 address, which mpirun's lists cannot have",
        ),
        (
            MpirunLauncher("mpirun", Flavour.MPICH),
            tuple(Host(name=f"{n:0200}") for n in range(1000)),
            "the job's words are 203415 bytes (at most 102400) for mpirun",
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused(fleet, launcher, fleet_hosts, sentence):
    with pytest.raises(UsageError) as refusal:
        launcher.plan(replace(fleet, hosts=fleet_hosts))

    assert refusal.value.message == sentence


@pytest.mark.parametrize(
    "launcher", [SlurmLauncher(), MpirunLauncher("mpirun", Flavour.OPEN_MPI_5)]
)
def test_words_too_long_for_a_variable_are_refused(fleet, launcher):
    with pytest.raises(UsageError, match=r"^the job's words are 1[0-9]{5} bytes \(at most 102400"):
        launcher.plan(replace(fleet, words=("x" * 110_000,)))


@pytest.mark.parametrize(
    "options",
    [SlurmOptions(partition="a b"), SlurmOptions(output="a\n#SBATCH --wrap=x"),
     SlurmOptions(more=("--comment=a#b",))],
)  # fmt: skip
def test_what_cannot_stand_in_a_batch_script_is_refused(fleet, options):
    with pytest.raises(UsageError, match="cannot stand in a batch script"):
        SlurmLauncher(options).plan(fleet)
