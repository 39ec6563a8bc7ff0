"""What Slurm says of a job, as 22.05 prints it."""

import pytest

from launchers.slurm import SlurmOptions, open_launcher, parse_end, render_limit
from msrun.errors import UsageError

SHOWN = """JobId=2 JobName=t
   Priority=4294901758 Nice=0 Account=(null) QOS=(null)
   JobState={} Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={}
   Command=JobState=FAILED
"""


@pytest.mark.parametrize(
    ("state", "exit_code", "code"),
    [
        ("PENDING", "0:0", None),
        ("RUNNING", "0:0", None),
        ("COMPLETING", "3:0", 3),
        ("COMPLETING", "0:0", None),
        ("COMPLETING", "0:15", None),
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("FAILED", "0:9", 137),
        ("NODE_FAIL", "0:0", 120),
        ("CANCELLED", "0:15", 143),
        ("CANCELLED", "0:0", 143),
        ("TIMEOUT", "0:0", 143),
        ("OUT_OF_MEMORY", "0:125", 253),
        ("FAILED", "?", 120),
    ],
)
def test_the_code_of_a_job_that_has_ended(state, exit_code, code):
    assert parse_end(SHOWN.format(state, exit_code)) == code


@pytest.mark.parametrize(
    ("state", "exit_code", "code"),
    [("COMPLETING", "0:0", 0), ("RUNNING", "0:0", None), ("PENDING", "0:0", None)],
)
def test_a_job_that_has_said_of_itself_that_it_ended_well(state, exit_code, code):
    comment = "   Comment=the user's msrun:ended-well\n"

    assert parse_end(SHOWN.format(state, exit_code) + comment) == code


def test_a_job_that_slurm_does_not_know():
    assert parse_end("slurm_load_jobs error: Invalid job id specified") is None


def test_options_by_name():
    launcher = open_launcher(
        {"partition": "p", "cpus-per-node": "4", "requeue": "true", "sbatch-args": "--a --b"}
    )

    assert launcher._options == SlurmOptions(
        partition="p", cpus_per_node=4, requeue=True, more=("--a", "--b")
    )


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ("90", "90"),
        ("1:30:00", "1:30:00"),
        ("2-12", "2-12"),
        ("unlimited", "unlimited"),
        ("1h", "1:00:00"),
        ("2d90s", "48:01:30"),
        ("0.5", "0:00:01"),
        ("inf", "UNLIMITED"),
    ],
)
def test_a_limit_is_written_as_slurm_reads_it(given, limit):
    assert render_limit(given) == limit


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        ({"mpirun": "x"}, "--launcher slurm has no option --mpirun (choose --sbatch-args, "),
        ({"cpus-per-node": "x"}, "--launcher slurm: Expected `int | null`, got `str` - at "),
    ],
)
def test_options_that_are_refused(options, beginning):
    with pytest.raises(UsageError) as refusal:
        open_launcher(options)

    assert refusal.value.message.startswith(beginning)
