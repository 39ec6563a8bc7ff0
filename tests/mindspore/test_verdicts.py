"""One table: a line of MindSpore's documentation, and what real MindSpore and msrun make of it.

Where the two differ it is on purpose, and `docs/how-to/from_mindspore.md` says why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from ports import free_port
from support import script, until

OURS, THEIRS = "msrun", "mindspore.parallel.cluster.run"
pytestmark = [pytest.mark.slow, pytest.mark.process]

SAYS = """
    import json, os, sys
    if os.environ.get("MS_ROLE") != "MS_SCHED":
        names = "RANK_ID RANK_SIZE MS_ROLE MS_WORKER_NUM MS_NODE_ID DEVICE_ID MS_TOPO_TIMEOUT"
        said = {name: os.environ.get(name) for name in (*names.split(), "RANK_TABLE_FILE")}
        said["cpus"], said["args"] = sorted(os.sched_getaffinity(0)), sys.argv[1:]
        with open("said-" + os.environ["RANK_ID"], "w") as file:
            json.dump(said, file)
        sys.exit(int(os.environ.get("CODE", "0")))
"""
BOTH = "--worker_num=2 --local_worker_num=2 --log_dir=logs"
WORKER_LOGS = ("worker_0.log", "worker_1.log")


@dataclass
class Verdict:
    """What becomes of a line.

    Args:
        ours: Exit code of msrun.
        theirs: Exit code of MindSpore's.
        workers: How many run under both.
        logs: Logs of workers under both.
        env: Variables of both.
    """

    ours: int = 0
    theirs: int = 0
    workers: int = 2
    logs: tuple[str, ...] = WORKER_LOGS
    env: dict[str, str] = field(default_factory=dict)


NONE = {"workers": 0, "logs": ()}
TABLE = {
    f"{BOTH} --join=True P a --lr=1 --worker_num=9 -- --z": Verdict(),
    f"{BOTH} --join=False P": Verdict(),
    f"{BOTH} --join=1 python P a": Verdict(),
    f"{BOTH} --join=True --master_addr=127.0.0.1 --master_port=PORT P": Verdict(),
    f"{BOTH} --join=True --node_rank=3 P": Verdict(),
    f"{BOTH} --join=True --cluster_time_out=77 P": Verdict(),
    f"{BOTH} --join=True --tail_worker_log=0 P": Verdict(),
    f"{BOTH} --join=True --tail_worker_log=5 P": Verdict(),
    f"{BOTH} --join=True --bind_core=True P": Verdict(),
    f'{BOTH} --join=True --bind_core={{"device0":["0"],"device1":["1"]}} P': Verdict(),
    f"{BOTH} --join=True --rank_table_file=TABLE P": Verdict(),
    f"{BOTH} --join=True --worker_log_name={{ip}}_x P": Verdict(
        logs=("127.0.0.1_x_0.log", "127.0.0.1_x_1.log")
    ),
    f"{BOTH} --worker_n=2 --jo=True P": Verdict(),
    # The time to join is the option's; the variable is for processes that are started by hand.
    f"{BOTH} --join=True P ": Verdict(env={"MS_TOPO_TIMEOUT": "5"}),
    "--worker_num=0 --log_dir=logs P": Verdict(2, 1, **NONE),
    "--worker_num=2 --local_worker_num=4 --log_dir=logs P": Verdict(2, 1, **NONE),
    "--worker_num=two --log_dir=logs P": Verdict(2, 2, **NONE),
    f"{BOTH} --join=perhaps P": Verdict(2, 2, **NONE),
    f"{BOTH} --master_addr=no-such-host.invalid P": Verdict(2, 1, **NONE),
    f"{BOTH} --sim_level=5 P": Verdict(2, 2, **NONE),
    f"{BOTH} --bind_core=[1] P": Verdict(2, 2, **NONE),
}


@pytest.fixture
def both(launch, tmp_path):
    """Run one line under both commands; return what each made of it."""

    def run(line, env):
        table = tmp_path / "table.json"
        table.write_text(json.dumps(RANK_TABLE))
        known = {"P": script(tmp_path, SAYS), "TABLE": str(table)}
        words = [
            known.get(word, word.replace("PORT", str(free_port())).replace("TABLE", str(table)))
            for word in line.split()
        ]
        sides = [launch(command, words, env=env) for command in (OURS, THEIRS)]
        codes = [side.wait() for side in sides]
        return sides, codes

    return run


RANK_TABLE = {
    "version": "1.0",
    "server_count": "1",
    "status": "completed",
    "server_list": [
        {
            "server_id": "127.0.0.1",
            "pod_ip": "127.0.0.1",
            "device": [
                {"device_id": str(n), "device_ip": f"10.0.0.{n + 1}", "rank_id": str(n)}
                for n in range(2)
            ],
        }
    ],
}


def logs(side):
    ours = ("msrun.log", "scheduler.log")
    return tuple(name for name in side.logs() if name not in ours)


@pytest.mark.parametrize("line", TABLE)
def test_a_line_means_the_same(both, line):
    verdict = TABLE[line]

    sides, codes = both(line, verdict.env)

    assert codes == [verdict.ours, verdict.theirs]
    for side in sides:
        until(lambda side=side: len(side.written()) == verdict.workers, "for all workers")
    assert sides[0].files() == sides[1].files()
    assert [logs(side) for side in sides if verdict.workers] == [verdict.logs] * 2 * bool(
        verdict.workers
    )


def test_the_exit_code_of_a_worker_is_that_of_the_job(launch, tmp_path):
    """On purpose: MindSpore has 1 for every failure."""
    words = [*BOTH.split(), "--join=True", script(tmp_path, SAYS)]

    sides = [launch(command, words, env={"CODE": "7"}) for command in (OURS, THEIRS)]

    assert [side.wait() for side in sides] == [7, 1]


def test_workers_without_their_local_number_are_all_here(launch, tmp_path):
    """On purpose: MindSpore takes 8 for each number that is not given, and refuses the two."""
    words = ["--worker_num=2", "--log_dir=logs", "--join=True", script(tmp_path, SAYS)]

    sides = [launch(command, words) for command in (OURS, THEIRS)]

    assert [side.wait() for side in sides] == [0, 1]
    assert [sorted(side.files()) for side in sides] == [["said-0", "said-1"], []]


def test_options_of_the_script_are_its_own(launch, tmp_path):
    """On purpose: MindSpore's parser stops at `--b` of the script, which could begin two of its."""
    words = [*BOTH.split(), "--join=True", script(tmp_path, SAYS), "--b=1"]

    sides = [launch(command, words) for command in (OURS, THEIRS)]

    assert [side.wait() for side in sides] == [0, 2]
    assert json.loads(sides[0].files()["said-0"])["args"] == ["--b=1"]


def test_devices_may_be_bound_in_any_order(launch, tmp_path):
    """On purpose: MindSpore goes by the order of the keys, and binds nothing if it is another."""
    binding = '--bind_core={"device1":["1"],"device0":["0"]}'
    words = [*BOTH.split(), "--join=True", binding, script(tmp_path, SAYS)]

    sides = [launch(command, words) for command in (OURS, THEIRS)]

    assert [side.wait() for side in sides] == [0, 0]
    bound = [[json.loads(said)["cpus"] for said in side.files().values()] for side in sides]
    assert bound[0] == [[0], [1]]
    assert all(len(cpus) > 1 for cpus in bound[1])


def test_no_cluster_is_simulated(launch, tmp_path):
    """On purpose: a dry run is MindSpore's own, and torch has none."""
    words = ["--worker_num=16", "--sim_level=1", "--sim_rank_id=5", script(tmp_path, SAYS)]

    sides = [launch(command, words) for command in (OURS, THEIRS)]

    assert [side.wait() for side in sides] == [2, 0]
    until(lambda: sorted(sides[1].files()) == ["said-5"], "for the one process")
    assert "--sim_level 1 is refused: msrun simulates no cluster" in sides[0].err
