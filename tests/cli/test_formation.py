"""The options of several nodes, and the job that they make of each node."""

import pytest
from msgspec.structs import replace

from msrun.processes.control_file import Card

SEVERAL = "--nnodes 4 --master-addr"
SAME = {"listen_host": "10.0.0.1", "address": "10.0.0.1", "serves": True}
OTHER = {"listen_host": "10.0.0.9", "address": "10.0.0.1", "serves": False}
ALONE = {"listen_host": "127.0.0.1", "address": "127.0.0.1", "serves": True}
# Of several nodes on one machine: the stores have the port on 127.0.0.1.
LOCAL = {**ALONE, "listen_host": "127.0.0.2"}


def fields(job, names):
    return {name: getattr(job, name) for name in names}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"nnodes_min": 1, "nnodes_max": 1, "master_port": 0, "is_alone": True, **ALONE}),
        ("--master-addr node0", {"nnodes_max": 1, "is_alone": True, **ALONE}),
        ("--nnodes 4 --master-addr node0", {"nnodes_min": 4, "nnodes_max": 4, "is_alone": False}),
        ("--nnodes 2:4 --master-addr node0", {"nnodes_min": 2, "is_elastic": True}),
        ("--nnodes 4 --master-addr node0", {"is_elastic": False, "last_call": 30.0}),
        ("--nnodes 2:4 --master-addr node0 --last-call 5s", {"last_call": 5.0}),
        (
            "--nnodes 2:4 --rdzv-endpoint node0 --rdzv-conf last_call_timeout=0,join_timeout=9",
            {"last_call": 0.0, "join_timeout": 9.0, "master_port": 29500},
        ),
        ("--nnodes 4 --rdzv-endpoint node0", {"master_port": 29500}),
        ("--nnodes 4 --master-addr node0 --master-port 8118", {"master_port": 8118}),
        (f"{SEVERAL} node1 --node-rank 3", {"node_rank": 3}),
        (f"{SEVERAL} node1 --nproc-per-node 3", {"workers_per_node": 3, "world_size": None}),
    ],
)
def test_nodes(msrun, words, expected):
    outcome = msrun(f"{words} train.py")

    assert (outcome.code, outcome.err) == (0, "")
    assert fields(outcome.job, expected) == expected


@pytest.mark.parametrize(
    ("words", "store", "scheduler"),
    [
        ("", 0, 0),
        ("--master-port 8119", 8119, 0),
        ("--master-addr localhost --master-port 8119", 8119, 0),
        ("--rdzv-endpoint localhost:8119", 8119, 0),
        ("--rdzv-backend static --rdzv-endpoint localhost:8119", 8119, 0),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:8118", 0, 0),  # which is in use
        ("--rdzv-backend c10d --master-port 8119", 8119, 0),
        ("--standalone --rdzv-endpoint localhost:8118", 0, 0),
        ("--nnodes 2 --master-addr node0", 29500, 29500),
        ("--nnodes 2 --master-addr node1 --master-port 8119", 8119, 8119),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:8119", 0, 8119),
    ],
)
def test_the_port_of_the_store_is_torchruns(msrun, system, words, store, scheduler):
    system.busy[8118] = "is in use by pid 42 (python)"
    job = msrun(f"{words} train.py").job

    assert (job.store_port, job.scheduler_port) == (store, scheduler)


@pytest.mark.parametrize(
    ("words", "nodes", "workers", "total"),
    [
        ("--worker_num=8 --local_worker_num=4 --master_addr=node0", (1, 8), 4, 8),
        ("--worker_num=8 --local_worker_num=4 --master_addr=node1 --node_rank=1", (1, 8), 4, 8),
        ("--worker_num=8 --local_worker_num=8 --master_addr=node0", (1, 1), 8, None),
        ("--worker_num 8 --nnodes 2 --master_addr node0", (2, 2), 4, 8),
        ("--worker_num 8 --nnodes 2 --local_worker_num 3 --master_addr node0", (2, 2), 3, 8),
        ("--worker_num 8 --nnodes 2:4 --nproc-per-node 2 --master_addr node0", (2, 4), 2, 8),
    ],
)
def test_a_number_of_all_workers(msrun, words, nodes, workers, total):
    job = msrun(f"{words} train.py").job

    assert (job.nnodes_min, job.nnodes_max) == nodes
    assert (job.workers_per_node, job.world_size) == (workers, total)
    assert job.is_elastic is False


def test_a_number_of_all_workers_in_the_job_file(msrun, here):
    (here / "job.yaml").write_text("worker-num: 8\nmaster-addr: node1\n")

    job = msrun("--config job.yaml --workers-per-node 2 train.py").job

    assert (job.world_size, job.workers_per_node, job.is_alone) == (8, 2, False)


def test_as_many_workers_as_this_node_has_devices(msrun, gpus):
    gpus(3)

    job = msrun("--nnodes 2 --master-addr node1 train.py").job

    assert (job.workers_per_node, job.world_size) == (3, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("node0", SAME),
        ("NODE0", SAME),
        ("10.0.0.1", SAME),
        ("node0 --node-rank 0", SAME),
        ("node0 --node-rank 1", SAME),
        ("node1", OTHER),
        ("10.0.0.9 --node-rank 1", OTHER),
        ("node6", {"listen_host": "fd00::9", "address": "fd00::1", "serves": False}),
        ("[fd00::1]", {"listen_host": "fd00::1", "address": "fd00::1", "serves": True}),
        ("localhost", LOCAL),
        ("localhost.localdomain", LOCAL),
        ("ip6-localhost", {"listen_host": "::1", "address": "::1", "serves": True}),
        ("localhost --node-rank 0", LOCAL),
        ("localhost --node-rank 1", {**LOCAL, "serves": False}),
        ("127.0.0.1 --node-rank 2", {**LOCAL, "serves": False}),
        ("::1", {"listen_host": "::1", "address": "::1", "serves": True}),
        ("node1 --local-addr fd00::1", {**OTHER, "address": "fd00::1"}),
        ("node0 --local-addr fd00::1", {**SAME, "address": "fd00::1"}),
    ],
)
def test_who_starts_the_scheduler_and_how_nodes_are_reached(msrun, system, words, expected):
    system.names["NODE0"] = system.names["node0"]

    outcome = msrun(f"--nnodes 4 --master-addr {words} train.py")

    assert (outcome.code, outcome.err) == (0, "")
    assert fields(outcome.job, expected) == expected


def test_a_name_of_several_machines_means_the_first_of_them_everywhere(msrun, system):
    first = msrun(f"{SEVERAL} all-nodes train.py").job
    system.own = ("10.0.0.9",)
    second = msrun(f"{SEVERAL} all-nodes train.py").job

    assert (first.serves, first.listen_host) == (True, "10.0.0.1")
    assert (second.serves, second.listen_host) == (False, "10.0.0.1")


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("node0", "node0"),
        ("node0.cluster", "node0"),
        ("node0", "node0.cluster"),
        ("node0", "NODE0"),
    ],
)
def test_a_machine_whose_name_means_loopback_listens_where_others_reach_it(
    msrun, system, name, host
):
    system.names[name] = ("127.0.1.1",)
    system.machine = replace(system.machine, host=host)

    assert fields(msrun(f"{SEVERAL} {name} train.py").job, SAME) == SAME
    assert msrun(f"{SEVERAL} {name} --node-rank 1 train.py").job.serves is False


def test_a_machine_that_the_resolver_does_not_know_is_still_itself(msrun, system):
    system.names = {}

    assert fields(msrun(f"{SEVERAL} node0 train.py").job, SAME) == SAME


def test_a_machine_without_a_way_out_is_reached_by_its_only_address(msrun, system):
    system.names["node0"] = ("127.0.1.1",)
    system.machine = replace(system.machine, address="127.0.0.1")
    system.own = ("10.0.0.1", "fd00::1")

    assert fields(msrun(f"{SEVERAL} node0 train.py").job, SAME) == SAME


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            (),
            (
                "error: --master-addr node0 resolves to 127.0.1.1, "
                "and this machine has no address that others can reach\n"
            ),
        ),
        (
            ("10.0.0.1", "10.0.0.2"),
            (
                "error: --master-addr node0 resolves to 127.0.1.1, "
                "and this machine has several other addresses\n"
                "  hint: give one as --master-addr (it has 10.0.0.1, 10.0.0.2)\n"
            ),
        ),
    ],
)
def test_a_machine_that_others_cannot_reach_by_its_name(msrun, system, own, sentence):
    system.names["node0"] = ("127.0.1.1",)
    system.machine = replace(system.machine, address="127.0.0.1")
    system.own = own

    outcome = msrun(f"{SEVERAL} node0 train.py")

    assert (outcome.code, outcome.err) == (2, sentence)


def test_a_machine_whose_name_means_another(msrun, system):
    system.names["node0"] = ("203.0.113.5",)

    assert msrun(f"{SEVERAL} node0 train.py").err == (
        "error: --master-addr node0 is this machine, but resolves to 203.0.113.5, "
        "which it does not have (it has 10.0.0.1, fd00::1)\n"
        "  hint: correct what node0 resolves to, or give an address\n"
    )


def test_a_network_without_a_route(msrun, system):
    system.own = ("fd00::1",)

    assert msrun(f"{SEVERAL} node1 train.py").err == (
        "error: --master-addr node1: this machine has no route to 10.0.0.9\n"
    )


def test_all_nodes_give_a_job_the_same_name(msrun, system):
    words = "--worker_num 8 --local_worker_num {} --master_addr node0 train.py --lr 1"

    here = msrun(words.format(4)).job
    system.own, system.machine = ("10.0.0.9",), replace(system.machine, host="node1")
    there = msrun(words.format(2)).job
    others = [
        msrun(changed).job.job_id
        for changed in (
            words.format(4) + "0",
            words.format(4).replace("node0", "node1"),
            words.format(4).replace("8", "16"),
            "--master-port 1 " + words.format(4),
        )
    ]

    assert here.job_id == there.job_id
    assert len({here.job_id, *others}) == 5
    assert here.job_id.startswith("train-")
    assert len(here.job_id) == len("train-0a1b2c")


@pytest.mark.parametrize("option", ["--job-id", "--rdzv-id"])
def test_a_name_that_is_given_is_the_name(msrun, option):
    assert msrun(f"{SEVERAL} node0 {option} nightly train.py").job.job_id == "nightly"


def test_a_secret_of_its_own(msrun, here):
    (here / "secret").touch(mode=0o600)
    (here / "secret").write_bytes(bytes(32))

    assert msrun("--secret-file secret train.py").job.secret_file == str(here / "secret")
    assert msrun("train.py", MSRUN_SECRET_FILE="secret").job.secret_file == str(here / "secret")
    assert msrun("--insecure train.py", MSRUN_SECRET_FILE="secret").job.secret_file is None
    assert msrun(f"{SEVERAL} node0 train.py").job.secret_file is None


def test_nodes_of_one_machine_may_do_without_a_secret(msrun):
    job = msrun(f"{SEVERAL} localhost --insecure train.py").job

    assert (job.insecure, job.is_alone) == (True, False)


@pytest.mark.parametrize(
    ("words", "tail", "local"),
    [
        ("--tail 0,5", {0, 5}, None),
        ("--tail all", None, {0, 1}),
        ("--tail none", set(), None),
        ("-t 3", None, {0, 1}),
        ("-t 1:3", None, {1}),
        ("-t 0", None, None),
        ("--local-ranks-filter 1", None, {1}),
        ("--tail 0,5 --local-ranks-filter 1", {0, 5}, {1}),
        ("-t 3 --local-ranks-filter 1", None, {1}),
        ("--tail all -t 3", None, {0, 1}),
    ],
)
def test_ranks_on_the_console(msrun, words, tail, local):
    job = msrun(f"--nnodes 4 --master-addr node0 --nproc-per-node 2 {words} train.py").job

    assert (job.tail, job.tail_local) == (tail, local)


def test_ranks_that_no_node_has(msrun):
    words = "--nnodes 2 --master-addr node0 --nproc-per-node 2"

    assert msrun(f"{words} --tail 4 train.py").err == (
        "error: --tail 4 names rank 4, which does not exist (choose 0 to 3)\n"
    )
    assert msrun(f"{words} -t 2:3 train.py").err == (
        "error: -t 2:3 names rank 2, which does not exist (choose 0 to 1)\n"
    )
    assert msrun(f"{words} --tail 0 -t 3 train.py").err == "error: -t 3 contradicts --tail 0\n"


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--last-call 5", "--last-call 5 has no effect: the number of nodes is fixed"),
        (
            "--nnodes 2 --master-addr node0 --rdzv-conf last_call_timeout=5",
            "--rdzv-conf last_call_timeout=5 has no effect: the number of nodes is fixed",
        ),
        (
            "--standalone --rdzv-endpoint node0:1",
            "--rdzv-endpoint node0:1 has no effect: --standalone takes a free port of this node",
        ),
        (
            "--rdzv-endpoint node0:1 --master-addr localhost --master-port 1",
            "--master-addr localhost has no effect: --rdzv-endpoint node0:1 goes before it",
        ),
        (
            "--master-port 2 --rdzv-endpoint node0:1",
            "--master-port 2 has no effect: --rdzv-endpoint node0:1 goes before it",
        ),
        (
            "--rdzv-conf is_host=1",
            (
                "--rdzv-conf is_host=1: is_host has no effect on msrun's rendezvous "
                "(--join-timeout is the time for all nodes to register)"
            ),
        ),
    ],
)
def test_what_has_no_effect_is_noted(msrun, words, note):
    outcome = msrun(f"{words} train.py")

    assert (outcome.code, outcome.err) == (0, f"note: {note}\n")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("w{rank}", "w{rank}"),
        ("w", "w_{rank}"),
        ("{host}_{local_rank}", "{host}_{local_rank}_{rank}"),
    ],
)
def test_logs_that_nodes_may_keep_in_one_directory(msrun, name, expected):
    outcome = msrun(["--nnodes=2", "--master-addr=node0", f"--worker-log-name={name}", "train.py"])

    assert outcome.job.worker_log_name == expected
    assert outcome.err == (
        "note: --worker-log-name {host}_{local_rank} is followed by the rank, "
        "since nodes may share --log-dir\n"
        if "host" in name
        else ""
    )


@pytest.mark.parametrize(
    ("words", "is_known"),
    [
        ("--nnodes 2 --nproc-per-node 3", True),
        ("--nnodes 2:4 --nproc-per-node 3", False),
        ("--nnodes 2", False),
        ("--nnodes 2 --nproc-per-node auto", False),
        ("--nnodes 2:4 --worker-num 6 --nproc-per-node 2", True),
    ],
)
def test_a_mesh_is_checked_as_soon_as_the_workers_are_known(msrun, words, is_known):
    parallel = '--parallel \'{"mesh": {"dp": 5}, "mode": "manual"}\''

    outcome = msrun(f"{words} --master-addr node0 {parallel} train.py")

    if is_known:
        assert (outcome.code, outcome.job) == (2, None)
        assert "parallel.mesh: dp 5 is not world_size 6" in outcome.err
    else:
        assert outcome.code == 0
        assert outcome.err == (
            "note: --parallel is checked when all nodes have registered, "
            "unless --worker-num gives their workers\n"
        )


@pytest.mark.parametrize(("began", "code"), [("train-1", 0), ("train-2", 2)])
def test_a_port_that_another_node_of_the_job_took_a_moment_ago_is_free_for_it(
    msrun, system, began, code
):
    system.busy[4242] = "is in use by pid 77 (python)"
    system.beginning = [
        Card(
            job_id=began,
            host="127.0.0.1",
            port=4242,
            keys=None,
            pid=77,
            log_dir="/logs",
            workers=2,
            serves=True,
            began=876.5,
        )
    ]

    words = "--nnodes 2 --job-id train-1 --master-addr localhost --master-port 4242 train.py"
    outcome = msrun(words)

    assert outcome.code == code
    assert ("port 4242 is in use by pid 77" in outcome.err) == bool(code)
