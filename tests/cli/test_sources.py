"""Where a value comes from: flag beats environment beats file beats default."""

import json
from itertools import product
from operator import attrgetter

import msgspec
import pytest

from msrun.cli.options.fleet import FLEET_TABLE
from msrun.cli.options.option import FileForm
from msrun.cli.options.table import TABLE
from msrun.job import JobSpec, RestartLimits

# One good text an option that is not refused.
TEXTS = {
    "nnodes": "1:1",
    "node-rank": "0",
    "worker-num": "2",
    "server-num": "2",
    "master-addr": "localhost",
    "master-port": "29500",
    "rdzv-endpoint": "localhost:29500",
    "standalone": "true",
    "join-timeout": "5m",
    "last-call": "5s",
    "lease": "4s",
    "rdzv-conf": "timeout=300,last_call_timeout=5",
    "job-id": "nightly",
    "rdzv-id": "nightly",
    "launcher": "dynamic",
    "secret-file": "secret",
    "insecure": "true",
    "data-tls": "true",
    "module": "false",
    "no-python": "false",
    "run-path": "true",
    "workers-per-node": "2",
    "start-method": "exec",
    "preload": "numpy,json",
    "env": "A=1",
    "role": "trainer",
    "virtual-local-rank": "true",
    "join": "false",
    "max-restarts": "2",
    "restart-window": "1h",
    "no-progress-limit": "1",
    "exclude-after": "3",
    "grace": "30s",
    "hang-timeout": "90s",
    "detect-idle": "5m",
    "log-dir": "logs",
    "emit-rank-table": "out.json",
    "worker-log-name": "w{rank}",
    "log-limit": "1GiB",
    "tail": "0",
    "tee": "3",
    "duplicate-stdout-filters": "loss,acc",
    "duplicate-stderr-filters": "error",
    "local-ranks-filter": "0",
    "bind-core": "auto",
    "bind-numa": '{"device0": [0]}',
    "numa-binding": "node",
    "parallel": '{"accumulate": 2}',
    "redirects": "3",
    "monitor-interval": "1",
    "signals-to-handle": "SIGTERM",
    "local-addr": "10.0.0.1",
    "rdzv-backend": "static",
    "logs-specs": "default",
    "event-log-handler": "null",
    "framework": "mindspore",
}
OPTIONS = {option.name: option for option in TABLE}


def test_every_option_is_tried():
    working = {option.name for option in TABLE if not option.refusal}
    elsewhere = {option.name for option in FLEET_TABLE}  # in test_fleet

    assert working - {"config"} - elsewhere == set(TEXTS)


# Help describes these defaults, which the machine or the other options decide.
DESCRIBED = {
    *("node-rank", "worker-num", "master-addr", "master-port", "job-id", "secret-file"),
    *("workers-per-node", "hang-timeout", "log-dir", "tail", "tee", "redirects"),
    *("bind-core", "bind-numa", "grace"),
}


@pytest.mark.parametrize("option", [o for o in TABLE if o.field], ids=lambda option: option.name)
def test_help_shows_the_default_that_the_job_has(msrun, option):
    default = attrgetter(option.field)(msrun("train.py").job)

    if option.name in DESCRIBED:
        assert option.default_text
    elif option.default_text:
        assert option.parse(option.default_text) == default
    else:
        assert not default


# What no option fills by itself.
FILLED_BY_CODE = {
    *("program", "cwd", "nnodes_min", "nnodes_max", "node_name", "device", "serves", "beside"),
    *("stop_signals", "store_port", "is_replaced", "is_server"),
    *("listen_host", "address", "parallel", "rank_table", "emit_rank_table", "detach"),
    *("restarts.backoff_initial", "restarts.backoff_max", "restarts.early"),
}


def test_every_field_of_a_job_is_filled():
    parts = [f"restarts.{name}" for name in RestartLimits.__struct_fields__]
    names = {*JobSpec.__struct_fields__, *parts} - {"restarts"}
    fields = [option.field for option in TABLE if option.field]

    assert len(fields) == len(set(fields))
    assert names == set(fields) | FILLED_BY_CODE


def job_file(here, text):
    (here / "job.yaml").write_text(text)
    return "--config=job.yaml"


@pytest.mark.parametrize(("name", "text"), TEXTS.items())
def test_every_form_means_the_same(msrun, here, name, text):
    option = OPTIONS[name]
    (here / "secret").touch(mode=0o600)
    (here / "secret").write_bytes(bytes(32))

    by_flag = msrun([f"--{name}={text}", "train.py"])
    others = [msrun([f"--{name.replace('-', '_')}={text}", "train.py"])]
    others += [msrun(["train.py"], **{variable: text}) for variable in option.variables]
    if option.file is not FileForm.ABSENT:
        value = "{A: 1}" if option.file is FileForm.VARIABLES else json.dumps(text)
        others.append(msrun([job_file(here, f"{name}: {value}\n"), "train.py"]))
        others.append(msrun([job_file(here, f"{name.replace('-', '_')}: {value}\n"), "train.py"]))

    assert by_flag.job == msgspec.convert(msgspec.to_builtins(by_flag.job), JobSpec)
    if name == "workers-per-node":  # torchrun's own word for it brings torchrun's grace
        torchruns = others.pop(2).job
        assert torchruns == msgspec.structs.replace(by_flag.job, grace=30.0)
    assert [other.job for other in others] == [by_flag.job] * len(others)


@pytest.mark.parametrize("given", list(product((True, False), repeat=4)))
def test_precedence(msrun, here, given):
    flag, own, pet, file = given
    words = ["plan", "--json", *["--shutdown_timeout=4"] * flag]
    variables = {"MSRUN_GRACE": "3"} if own else {}
    variables |= {"PET_SHUTDOWN_TIMEOUT": "2"} if pet else {}
    words += [job_file(here, "grace: 1\n")] if file else []

    outcome = msrun([*words, "train.py"], **variables)

    candidates = [
        (flag, {"value": "4s", "source": "flag --shutdown_timeout"}),
        (own, {"value": "3s", "source": "environment MSRUN_GRACE"}),
        (pet, {"value": "2s", "source": "environment PET_SHUTDOWN_TIMEOUT"}),
        (file, {"value": "1s", "source": "file job.yaml"}),
        (True, {"value": "10s", "source": "default"}),
    ]
    assert json.loads(outcome.out)["job"]["grace"] == next(
        value for is_given, value in candidates if is_given
    )


def test_torchrun_variables(msrun):
    job = msrun("train.py", PET_NPROC_PER_NODE="4", PET_MAX_RESTARTS="2", PET_RDZV_ID="x").job

    assert (job.workers_per_node, job.restarts.max_restarts, job.job_id) == (4, 2, "x-0a1b2c")


def test_torchrun_switches(msrun):
    assert msrun("pkg", PET_MODULE="1").job.program.kind.value == "module"
    assert msrun("./prog", PET_NO_PYTHON="1").job.program.kind.value == "command"
    assert msrun("train.py", PET_STANDALONE="0").job is not None


def test_the_last_flag_counts(msrun):
    assert msrun("--nproc-per-node 2 --workers-per-node 3 train.py").job.workers_per_node == 3


def test_an_empty_variable_says_nothing(msrun):
    assert msrun("train.py", PET_NPROC_PER_NODE="", MSRUN_GRACE="").job.workers_per_node == 1


@pytest.mark.parametrize(
    ("words", "variables", "workers"),
    [
        ("--worker_num 4", {"PET_NPROC_PER_NODE": "2"}, 4),
        ("--nproc-per-node 4", {"MSRUN_WORKER_NUM": "2"}, 4),
    ],
)
def test_a_stronger_source_ends_a_contradiction(msrun, words, variables, workers):
    assert msrun(f"{words} train.py", **variables).job.workers_per_node == workers


def test_a_standalone_flag_beats_an_endpoint_in_the_environment(msrun):
    outcome = msrun("--standalone train.py", PET_RDZV_ENDPOINT="10.0.0.9:29400")

    assert (outcome.err, outcome.job.master_addr, outcome.job.master_port) == ("", None, 0)


def test_a_standalone_flag_beats_nodes_in_the_environment(msrun):
    outcome = msrun("plan --json --standalone train.py", PET_NNODES="4")

    assert outcome.err == ""
    assert json.loads(outcome.out)["job"]["nnodes"] == {"value": 1, "source": "flag --standalone"}


def test_an_endpoint_flag_beats_an_address_in_the_environment(msrun):
    job = msrun("--rdzv-endpoint localhost train.py", PET_MASTER_ADDR="10.0.0.9").job

    assert job.master_addr == "localhost"


def test_variables_of_the_workers_add_up(msrun, here):
    config = job_file(here, "env: {A: file, B: file, C: file}\n")

    job = msrun([config, "--env", "A=flag", "train.py"], MSRUN_ENV="A=x B='two words' D=").job

    assert job.env == {"A": "flag", "B": "two words", "C": "file", "D": ""}


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {"PET_NPROC_PER_NODE": "x"},
            (
                "environment PET_NPROC_PER_NODE='x' is no number of workers "
                "(choose 1 or more, auto, gpu, npu or cpu)"
            ),
        ),
        (
            {"MSRUN_MAX_RESTARTS": "x"},
            (
                "environment MSRUN_MAX_RESTARTS='x' is not a whole number "
                "(choose a whole number from 0)"
            ),
        ),
        (
            {"PET_NNODES": "4"},
            (
                "environment PET_NNODES=4 needs the node that runs the scheduler\n"
                "  hint: add --master-addr HOST, the same on every node"
            ),
        ),
        (
            {"MSRUN_ENV": "A='"},
            'environment MSRUN_ENV="A=\'" has an unmatched quotation mark',
        ),
        (
            {"MSRUN_CONFIG": "nowhere.yaml"},
            "environment MSRUN_CONFIG=nowhere.yaml cannot be read: No such file or directory",
        ),
        (
            {"MSRUN_ROLE": "a\x1b[2J", "MSRUN_HOSTFILE": "a\x1b[2J"},
            (
                r"environment MSRUN_HOSTFILE='a\x1b[2J' needs a backend that starts other nodes"
                "\n  hint: choose --launcher ssh, mpirun, slurm, kubernetes"
            ),
        ),
    ],
)
def test_a_message_names_the_variable(msrun, variables, sentence):
    outcome = msrun("train.py", **variables)

    assert (outcome.code, outcome.err) == (2, f"error: {sentence}\n")


def test_a_misspelt_variable_is_noted(msrun):
    outcome = msrun("train.py", MSRUN_WORKER_PER_NODE="4", MSRUN_GENERATION="x", PET_NPROC="1")

    assert outcome.err == (
        "note: environment MSRUN_WORKER_PER_NODE is not used; "
        "did you mean MSRUN_WORKERS_PER_NODE?\n"
    )
    assert outcome.job.workers_per_node == 1


def test_a_parallel_configuration_reaches_the_job(msrun, here):
    (here / "p.yaml").write_text("parallel: {mesh: {dp: -1}, accumulate: 2}\n")
    expected = {"parallel": {"mesh": {"dp": -1}, "accumulate": 2}}

    by_flag = msrun("--parallel p.yaml train.py").job
    by_variable = msrun("train.py", MSRUN_PARALLEL="p.yaml").job
    by_file = msrun([job_file(here, "parallel: {mesh: {dp: -1}, accumulate: 2}"), "train.py"]).job

    assert json.loads(by_flag.parallel) == expected
    assert by_variable.parallel == by_file.parallel == by_flag.parallel
    assert msrun("train.py").job.parallel == ""
