"""`msrun plan`: all of its output."""

import json

import pytest

SHORT = """\
job:
  setting           value                          source
  job-id            train-0a1b2c                   default
  workers-per-node  2                              flag --nproc-per-node
  start-method      fork                           default
  log-dir           HERE/msrun_logs/train-0a1b2c  default
  max-restarts      3                              environment PET_MAX_RESTARTS

command:
  python train.py --lr '1 e'

workers:
  rank  local_rank  device  cpus  log
  0     0           -       -     HERE/msrun_logs/train-0a1b2c/worker_0.log
  1     1           -       -     HERE/msrun_logs/train-0a1b2c/worker_1.log

containment:
  subreaper
"""

ALL = """\
job:
  setting             value               source
  job-id              nightly             flag --job-id
  nnodes              1                   flag --nnodes
  workers-per-node    2                   default
  master-addr         localhost           flag --rdzv-endpoint
  master-port         29500               flag --rdzv-endpoint
  join-timeout        inf                 flag --cluster_time_out
  start-method        exec                default
  env                 A='two words' B=''  flag --env
  log-dir             /nowhere/logs       flag --log-dir
  tail                none                flag --tail
  bind-core           auto                flag --bind-core
  bind-numa           device0=0-1         flag --bind-numa
  role                default             default
  virtual-local-rank  false               default
  preload             numpy,json          flag --preload
  join                false               flag --no-join
  max-restarts        0                   default
  restart-window      1h                  flag --restart-window
  no-progress-limit   3                   default
  grace               10s                 default
  worker-log-name     w{local_rank}       flag --worker-log-name
  insecure            false               default
  launcher            dynamic             default

command:
  ./prog

workers:
  rank  local_rank  device  cpus  log
  0     0           0       0     /nowhere/logs/w0.log
  1     1           1       1     /nowhere/logs/w1.log

containment:
  subreaper

environment of rank 1:
  A='two words'
  B=''
  NOTE='two words'
  RANK=1

notes:
  --monitor-interval 1 has no effect: a worker's exit is an event, nothing polls for it
  --preload numpy,json has no effect with --start-method exec
  no cgroup
"""


def squeezed(text):
    """Return `text` with runs of spaces as one, for columns that hold a temporary path."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_short_plan(msrun):
    words = "plan --nproc-per-node 2 train.py --lr '1 e'"

    outcome = msrun(words, PET_MAX_RESTARTS="3")

    assert squeezed(outcome.out) == squeezed(SHORT)
    assert (outcome.code, outcome.err, outcome.job) == (0, "", None)


def test_a_plan_with_everything(msrun, world, gpus):
    gpus(2)
    world.launcher.notes = ("no cgroup",)

    outcome = msrun(
        "plan --all --env-of 1 --job-id nightly --nnodes 1 --rdzv-endpoint localhost:29500 "
        "--cluster_time_out -1 --env A='two words' --env B= --log-dir /nowhere/logs --tail none "
        "--bind-core --bind-numa '{\"device0\": [0, 1]}' --preload numpy,json --no-join "
        "--restart-window 60m --worker-log-name w{local_rank} --monitor-interval 1 "
        "--no-python ./prog"
    )

    assert (outcome.code, outcome.err, outcome.out) == (0, "", ALL)


def test_nothing_is_made(msrun, here):
    before = sorted(here.rglob("*"))

    assert msrun("plan --log-dir new/logs train.py").code == 0

    assert sorted(here.rglob("*")) == before


def test_the_json_schema(msrun, gpus):
    gpus(1)

    outcome = msrun("plan --json --bind-core --tail 0 -r 3 -m pkg x")

    document = json.loads(outcome.out)
    job = document.pop("job")
    assert document == {
        "schema": 1,
        "program": {"kind": "module", "target": "pkg", "args": ["x"], "cwd": "HERE"},
        "command": ["python", "-m", "pkg", "x"],
        "workers": [
            {
                "rank": 0,
                "local_rank": 0,
                "node_rank": 0,
                "device": 0,
                "cpus": [0],
                "numa_nodes": [],
                "log": "HERE/msrun_logs/pkg-0a1b2c/worker_0.log",
                "env": {"NOTE": "two words", "RANK": "0"},
            }
        ],
        "machine": {"host": "node0", "cpus": [0, 1, 2, 3], "devices": ["cuda:0"]},
        "containment": "subreaper",
        "notes": ["-r 3 changes nothing: the output of every worker goes to its log"],
    }
    assert list(job) == [line.split()[0] for line in ALL.splitlines()[2:25]]
    assert job["tail"] == {"value": [0], "source": "flag --tail"}
    assert job["master-addr"] == {"value": None, "source": "default"}
    assert job["restart-window"] == {"value": "inf", "source": "default"}


def test_at_a_terminal(msrun, world, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    world.terminal = True

    outcome = msrun("plan --worker-num 2 train.py [bold]x")

    assert outcome.err == ""
    for words in ("workers-per-node  2", "flag --worker-num", "train.py '[bold]x'", "subreaper"):
        assert words in outcome.out


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_reaches_the_terminal_unescaped(msrun, world, terminal):
    world.terminal = terminal

    outcome = msrun(["plan", "train.py", "\x1b[2Jé\udcff\x07"])

    assert "\x1b[2J" not in outcome.out
    assert r"\x1b[2Jé\udcff\x07" in outcome.out
