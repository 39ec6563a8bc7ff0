"""`msrun plan`: all of its output."""

import json

import pytest

SHORT = """\
job:
  setting           value                          source
  job-id            train-0a1b2c                   default
  workers-per-node  2                              flag --nproc-per-node
  start-method      fork                           default
  max-restarts      3                              environment PET_MAX_RESTARTS
  grace             30s                            flag --nproc-per-node
  log-dir           HERE/msrun_logs/train-0a1b2c  default

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
  master-addr         localhost           flag --rdzv-endpoint
  master-port         29500               flag --rdzv-endpoint
  join-timeout        inf                 flag --cluster_time_out
  launcher            dynamic             default
  insecure            false               default
  data-tls            false               default
  workers-per-node    2                   default
  start-method        exec                default
  preload             numpy,json          flag --preload
  env                 A='two words' B=''  flag --env
  role                default             default
  virtual-local-rank  false               default
  join                false               flag --no-join
  max-restarts        0                   default
  restart-window      1h                  flag --restart-window
  no-progress-limit   0                   default
  grace               30s                 flag --rdzv-endpoint
  hang-timeout        -                   default
  detect-idle         inf                 default
  log-dir             /tmp/new/logs       flag --log-dir
  worker-log-name     w{local_rank}       flag --worker-log-name
  log-limit           512MiB              flag --log-limit
  tail                none                flag --tail
  tee                 -                   default
  redirects           0:3,1:1             flag -r
  bind-core           auto                flag --bind-core
  bind-numa           device0=0-1         flag --bind-numa
  parallel            -                   default

command:
  ./prog

workers:
  rank  local_rank  device  cpus  log
  0     0           0       0     /tmp/new/logs/w0.log
  1     1           1       1     /tmp/new/logs/w1.log

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

SEVERAL = """\
job:
  setting           value                         source
  job-id            nightly                       flag --job-id
  nnodes            2:4                           flag --nnodes
  master-addr       node1                         flag --master-addr
  workers-per-node  2                             flag --nproc-per-node
  start-method      fork                          default
  grace 30s flag --nproc-per-node
  log-dir           HERE/msrun_logs/nightly       default

formation:
  scheduler   10.0.0.9:29500
  started by  another node
  this node   10.0.0.1
  secret      HERE/config/msrun/secret
  ranks       assigned when all nodes have registered

command:
  python train.py

workers:
  rank  local_rank  device  cpus  log
  -     0           -       -     HERE/msrun_logs/nightly/worker_0.log
  -     1           -       -     HERE/msrun_logs/nightly/worker_1.log

containment:
  subreaper
"""

KNOWN = """\
formation:
  scheduler   [fd00::1]:8118
  started by  this node
  this node   fd00::1
  secret      HERE/secret
  ranks       if every node starts 2

command:
  python train.py

workers:
  rank  local_rank  device  cpus  log
  2     0           -       -     HERE/msrun_logs/nightly/worker_2.log
  3     1           -       -     HERE/msrun_logs/nightly/worker_3.log

containment:
  subreaper

environment of rank 3:
  NOTE='two words'
  RANK=3
"""

MESH = """\
mesh of 4 ranks:
  axis  size
  dp    2
  pp    1
  tp    2

groups along dp:
  0,2
  1,3

groups along tp:
  0,1
  2,3

coordinates:
  rank  dp  pp  tp
  0     0   0   0
  1     0   0   1
  2     1   0   0
  3     1   0   1
"""
CONFIG = {
    "mesh": {"dp": -1, "pp": 1, "tp": 2},
    "plan": [{"match": "*", "style": "rowwise"}],
    "optimizer": {"zero": 1, "threshold": 65536},
}


def squeezed(text):
    """Return `text` with runs of spaces as one, for columns that hold a temporary path."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_short_plan(msrun):
    words = "plan --nproc-per-node 2 train.py --lr '1 e'"

    outcome = msrun(words, PET_MAX_RESTARTS="3")

    assert squeezed(outcome.out) == squeezed(SHORT)
    assert (outcome.code, outcome.err, outcome.job) == (0, "", None)


def test_a_plan_with_everything(msrun, system, gpus):
    gpus(2)
    system.launcher.notes = ("no cgroup",)

    outcome = msrun(
        "plan --all --env-of 1 --job-id nightly --nnodes 1 --rdzv-endpoint localhost:29500 "
        "--cluster_time_out -1 --env A='two words' --env B= --log-dir /tmp/new/logs "
        "--log-limit 512MiB --tail none "
        "-r 0:3,1:1 "
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
        "parallel": None,
        "containment": "subreaper",
        "notes": [],
    }
    assert list(job) == [line.split()[0] for line in ALL.splitlines()[2:32]]
    assert job["tail"] == {"value": [0], "source": "flag --tail"}
    assert job["master-addr"] == {"value": None, "source": "default"}
    assert job["restart-window"] == {"value": "inf", "source": "default"}


@pytest.fixture
def config(here, monkeypatch):
    """A home without a secret."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    return here / "config"


def test_nodes_whose_ranks_are_not_known_yet(msrun, config):
    words = "--nnodes 2:4 --master-addr node1 --job-id nightly --nproc-per-node 2"

    outcome = msrun(f"plan {words} train.py")

    assert (outcome.code, outcome.err) == (0, "")
    assert squeezed(outcome.out) == squeezed(SEVERAL)
    assert not config.exists()


def test_nodes_whose_ranks_are_known(msrun, here):
    (here / "secret").touch(mode=0o600)
    (here / "secret").write_bytes(bytes(32))
    words = "--nnodes 2 --rdzv-endpoint [fd00::1]:8118 --node-rank 1 --job-id nightly"

    outcome = msrun(f"plan {words} --nproc-per-node 2 --secret-file secret --env-of 3 train.py")

    assert (outcome.code, outcome.err) == (0, "")
    assert squeezed(outcome.out[outcome.out.index("formation:") :]) == squeezed(KNOWN)


SERVERS = """
servers:
  server  node  log
  0       0     HERE/logs/server_0.log
  1       1     HERE/logs/server_1.log
  2       0     HERE/logs/server_2.log
"""


def test_nodes_as_json(msrun, config):
    words = "plan --json --worker-num 6 --nproc-per-node 1 --master-addr node0 train.py"

    document = json.loads(msrun(words).out)

    assert document["formation"] == {
        "nnodes": [1, 6],
        "world_size": 6,
        "scheduler": {"host": "10.0.0.1", "port": 29500},
        "serves": True,
        "address": "10.0.0.1",
        "secret": str(config / "msrun" / "secret").replace(str(config.parent), "HERE"),
    }
    assert document["job"]["nnodes"] == {"value": "1:6", "source": "flag --worker-num"}
    assert document["job"]["worker-num"] == {"value": 6, "source": "flag --worker-num"}
    assert document["workers"] == [
        {
            "rank": None,
            "local_rank": 0,
            "node_rank": None,
            "device": None,
            "cpus": [],
            "numa_nodes": [],
            "log": f"HERE/msrun_logs/{document['job']['job-id']['value']}/worker_0.log",
            "env": None,
        }
    ]


def test_servers(msrun):
    nodes = "--nnodes 2 --node-rank 1 --workers-per-node 1 --master-addr localhost"
    words = f"plan --server-num 3 --log-dir logs --job-id j {nodes} train.py"

    outcome = msrun(words)
    document = json.loads(msrun(words.replace("plan", "plan --json")).out)

    assert (outcome.code, outcome.err) == (0, "")
    found = outcome.out[outcome.out.index("\nservers:") : outcome.out.index("\ncontainment:")]
    assert squeezed(found) == squeezed(SERVERS)
    assert document["servers"][1] == {"server": 1, "node_rank": 1, "log": "HERE/logs/server_1.log"}
    assert "servers" not in json.loads(msrun("plan --json train.py").out)


def test_nodes_without_a_secret(msrun):
    words = "plan --json --nnodes 2 --master-addr localhost --insecure train.py"

    assert json.loads(msrun(words).out)["formation"]["secret"] == "none"


def test_at_a_terminal(msrun, system, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    system.terminal = True

    outcome = msrun("plan --worker-num 2 train.py [bold]x")

    assert outcome.err == ""
    for words in ("workers-per-node  2", "flag --worker-num", "train.py '[bold]x'", "subreaper"):
        assert words in outcome.out


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_reaches_the_terminal_unescaped(msrun, system, terminal):
    system.terminal = terminal

    outcome = msrun(["plan", "train.py", "\x1b[2Jé\udcff\x07"])

    assert "\x1b[2J" not in outcome.out
    assert r"\x1b[2Jé\udcff\x07" in outcome.out


@pytest.fixture
def parallel(here):
    text = json.dumps(CONFIG).replace("65536", '"64KiB"')
    (here / "p.yaml").write_text(f"parallel: {text}\n")
    return "--parallel p.yaml"


def test_the_mesh_of_a_job(msrun, parallel):
    outcome = msrun(f"plan {parallel} --worker-num 4 train.py")

    before, after = outcome.out.split(MESH)
    assert squeezed(before)[-2] == "3 3 - - HERE/msrun_logs/train-0a1b2c/worker_3.log"
    assert "parallel p.yaml flag --parallel" in squeezed(before)
    assert after == "\ncontainment:\n  subreaper\n"


@pytest.mark.parametrize(
    "words",
    [
        "--worker-num 4",
        "--worker-num 4 --nproc-per-node 2",
        "--nnodes 2 --nproc-per-node 2",
        "--nnodes 1:4",
        "--nproc-per-node cpu",
    ],
)
def test_a_mesh_without_a_program(msrun, parallel, words):
    outcome = msrun(f"plan {parallel} {words}")

    assert (outcome.code, outcome.err, outcome.out) == (0, "", MESH)


def test_a_mesh_has_the_devices_of_this_machine(msrun, parallel, gpus):
    gpus(4)

    assert msrun(f"plan {parallel}").out == MESH


def test_the_mesh_of_a_job_file(msrun, here):
    (here / "job.yaml").write_text(f"parallel: {json.dumps(CONFIG)}\nworker-num: 4\n")

    assert msrun("plan --config job.yaml").out == MESH
    rows = squeezed(msrun("plan --config job.yaml train.py").out)
    assert "parallel inline file job.yaml" in rows


LARGE = """\
mesh of 1024 ranks:
  axis  size
  dp    512
  pp    1
  tp    2

groups along dp:
  0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,...,1022 (512 ranks)
  1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,...,1023 (512 ranks)

groups along tp, 496 of 512 left out (see --all):
  0,1
  2,3
"""


def test_a_large_mesh_is_cut_short(msrun, parallel):
    out = msrun(f"plan {parallel} --worker-num 1024").out

    assert out.startswith(LARGE)
    assert "  30,31\n\ncoordinates, 1008 of 1024 left out (see --all):\n" in out
    assert out.endswith("  15    7   0   1\n")


def test_a_large_mesh_as_a_whole(msrun, parallel):
    out = msrun(f"plan --all {parallel} --worker-num 1024").out

    assert "..." not in out
    assert f"\n  {','.join(map(str, range(1, 1024, 2)))}\n" in out
    assert "\ngroups along tp:\n" in out
    assert out.endswith("  1023  511  0   1\n")


PARALLEL = {
    "config": CONFIG,
    "mesh": {"dp": 2, "pp": 1, "tp": 2},
    "groups": {
        "dp": [[0, 2], [1, 3]],
        "pp": [[0], [1], [2], [3]],
        "tp": [[0, 1], [2, 3]],
    },
    "coordinates": [
        {"dp": 0, "pp": 0, "tp": 0},
        {"dp": 0, "pp": 0, "tp": 1},
        {"dp": 1, "pp": 0, "tp": 0},
        {"dp": 1, "pp": 0, "tp": 1},
    ],
}


def test_the_mesh_as_json(msrun, parallel):
    alone = msrun(f"plan --json {parallel} --worker-num 4")
    of_job = msrun(f"plan --json {parallel} --worker-num 4 train.py")

    assert json.loads(alone.out) == {"schema": 1, "parallel": PARALLEL, "notes": []}
    document = json.loads(of_job.out)
    assert document["parallel"] == PARALLEL
    assert document["job"]["parallel"] == {"value": "p.yaml", "source": "flag --parallel"}


def test_words_of_mindspore_are_shown_with_ours(msrun, here):
    text = "{parallel_mode: data_parallel, gradients_mean: true, parameter_broadcast: true}"
    (here / "p.yaml").write_text(f"parallel: {text}\n")

    outcome = msrun("plan --parallel p.yaml --worker-num 2")

    assert outcome.out.startswith(
        "words of MindSpore:\n"
        "  given                         read as\n"
        "  parallel_mode: data_parallel  mode: data\n"
        "  gradients_mean: true          reduce.op: mean\n"
        "  parameter_broadcast: true     as it is here anyway\n"
        "\nmesh of 2 ranks:\n"
    )
    document = json.loads(msrun("plan --json --parallel p.yaml --worker-num 2").out)
    assert document["parallel"]["translated"] == {
        "parallel_mode: data_parallel": "mode: data",
        "gradients_mean: true": "reduce.op: mean",
        "parameter_broadcast: true": "as it is here anyway",
    }


def test_what_workers_get_for_hccl_is_shown(msrun):
    out = msrun("plan --env HCCL_IF_IP=10.0.0.1 --env HCCL_EXEC_TIMEOUT=9 train.py").out

    assert "\nHCCL:\n  HCCL_EXEC_TIMEOUT  9\n  HCCL_IF_IP         10.0.0.1\n" in out
    assert "HCCL" not in msrun("plan train.py").out


def test_notes_on_a_mesh(msrun, parallel):
    outcome = msrun(f"plan {parallel} --worker-num 4 --monitor-interval 1")

    assert outcome.out == (
        f"{MESH}\nnotes:\n"
        "  --monitor-interval 1 has no effect: a worker's exit is an event, nothing polls for it\n"
    )


def test_a_mesh_at_a_terminal(msrun, system, parallel):
    system.terminal = True

    out = msrun(f"plan {parallel} --worker-num 4").out

    assert squeezed(out)[:3] == ["mesh of 4 ranks", "axis size", "dp 2"]
    assert squeezed(out)[-2] == "3 1 0 1"
