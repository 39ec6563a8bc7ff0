"""Whose mpirun it is, by what real ones print."""

import pytest

from launchers.mpirun import Flavour, ask_flavour, open_launcher, parse_flavour
from msrun.errors import UsageError

PRINTED = {
    "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n": (
        Flavour.OPEN_MPI_4
    ),
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": (
        Flavour.OPEN_MPI_5
    ),
    "HYDRA build details:\n    Version:                                 4.0.2\n"
    "    Release Date:                            Thu Apr  7 12:34:45 CDT 2022\n": Flavour.MPICH,
    "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"
    "Copyright 2003-2026, Intel Corporation.\n": Flavour.INTEL,
}


@pytest.mark.parametrize(("printed", "flavour"), PRINTED.items())
def test_whose_mpirun_it_is(printed, flavour):
    assert parse_flavour(printed, "mpirun") is flavour


@pytest.mark.parametrize(("printed", "said"), [("", "nothing"), ("\n\x1b[2J", r"'\x1b[2J'")])
def test_an_unknown_mpirun_is_refused(printed, said):
    with pytest.raises(UsageError) as refusal:
        parse_flavour(printed, "my-mpirun")

    assert refusal.value.message == (
        f"--mpirun my-mpirun says {said} for --version, which is none of "
        "Open MPI 4, Open MPI 5, MPICH, Intel MPI"
    )


def test_an_mpirun_that_is_not_there_is_refused():
    with pytest.raises(UsageError) as refusal:
        ask_flavour("no-such-mpirun")

    assert refusal.value.message == "--mpirun no-such-mpirun is not there"


def test_an_unknown_option_is_refused_with_the_choices():
    with pytest.raises(UsageError) as refusal:
        open_launcher({"partition": "p"})

    assert refusal.value.message == (
        "--launcher mpirun has no option --partition (choose --mpirun, --mpirun-args)"
    )
