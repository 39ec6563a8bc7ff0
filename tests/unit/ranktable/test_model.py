"""Rank tables as values, and the error that holds their problems."""

import pickle

from ranktable import RankTable, RankTableError, Server, TableDevice, TableProblem, Version


def test_by_rank_orders_devices_of_all_servers():
    first = Server(
        server_id="b",
        device=(TableDevice(device_id=1, rank_id=3), TableDevice(device_id=0, rank_id=2)),
    )
    second = Server(
        server_id="a",
        device=(TableDevice(device_id=5, rank_id=0), TableDevice(device_id=4, rank_id=1)),
    )
    table = RankTable(version=Version.V1_0, server_list=(first, second))

    assert table.world_size == 4
    assert table.by_rank() == (
        (second, TableDevice(device_id=5, rank_id=0)),
        (second, TableDevice(device_id=4, rank_id=1)),
        (first, TableDevice(device_id=0, rank_id=2)),
        (first, TableDevice(device_id=1, rank_id=3)),
    )


def test_error_shows_one_problem_a_line():
    error = RankTableError(
        (TableProblem("status", "is missing"), TableProblem("", "the file is bad"))
    )

    assert str(error) == "status: is missing\nthe file is bad"


def test_error_cuts_a_long_list_but_holds_it_all():
    problems = tuple(TableProblem(f"server_list[{i}].device", "is missing") for i in range(25))
    error = RankTableError(problems)

    assert error.problems == problems
    assert str(error).splitlines()[19:] == [
        "server_list[19].device: is missing",
        "and 5 more problems",
    ]


def test_error_survives_pickling():
    error = RankTableError((TableProblem("status", "is missing"),))

    assert pickle.loads(pickle.dumps(error)).problems == error.problems
