"""`--help` and `--version`, the list of flags, and how little they load."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msrun import __version__
from msrun.cli.options.table import PLAN_TABLE, TABLE
from msrun.cli.verb_table import VERBS

HELP = Path(__file__).with_name("help.txt")


def words(text):
    return text.split()


# Adding a flag is a decision: change this list together with CHANGELOG and README.
FLAGS = words(
    """
--nnodes -N --nodes --node-rank --worker-num -n --master-addr --master-port --rdzv-endpoint
--local-addr --standalone --join-timeout --cluster-time-out --last-call --lease --rdzv-conf
--job-id --rdzv-id --launcher --secret-file --insecure --data-tls
--module -m --no-python --run-path --config
--workers-per-node --nproc-per-node --local-worker-num --start-method --preload --env --role
--virtual-local-rank --join --no-join --detach
--max-restarts --restart-window --no-progress-limit --exclude-after --grace
--shutdown-timeout --hang-timeout --detect-idle
--log-dir --emit-rank-table --worker-log-name --log-limit --tail --tail-worker-log
--tee -t --redirects -r --duplicate-stdout-filters --duplicate-stderr-filters --local-ranks-filter
--bind-core --bind-numa --numa-binding --parallel
--hostfile --rank-table-file --include --exclude --remote-python --ranks-by --ssh --mpirun
--mpirun-args
--partition --time --account --gpus-per-node --cpus-per-node --signal-seconds --requeue --output
--sbatch-args
--image --namespace --context --resources --shm --volumes --workdir --ship --ttl --node-selector
--tolerations --topology-spread --priority-class --service-account --image-pull-secrets --suspend
--k8s-kind --k8s-queue --k8s-gang --k8s-patch
--monitor-interval --signals-to-handle --rdzv-backend --logs-specs
--event-log-handler
--framework
--sim-level --sim-rank-id
"""
)
TORCHRUN = words(
    """
nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts
monitor_interval start_method event_log_handler role module no_python run_path log_dir redirects
tee local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters node_rank master_addr
master_port local_addr logs_specs numa_binding signals_to_handle shutdown_timeout
virtual_local_rank
"""
)
MINDSPORE = words(
    """
worker_num local_worker_num master_addr master_port node_rank log_dir join cluster_time_out
bind_core bind_numa sim_level sim_rank_id rank_table_file worker_log_name tail_worker_log
"""
)


def flags(table):
    return [s for o in table for s in (*o.spellings, *o.negatives)]


def test_the_flags_are_frozen():
    assert flags(TABLE) == FLAGS
    assert flags(PLAN_TABLE)[len(FLAGS) :] == ["--all", "--env-of", "--json", "--output-dir", "-o"]


@pytest.mark.parametrize("peer", [TORCHRUN, MINDSPORE], ids=["torchrun", "mindspore"])
def test_every_option_of_the_peers_is_known(peer):
    assert [name for name in peer if f"--{name.replace('_', '-')}" not in FLAGS] == []


def test_every_torchrun_variable_is_known():
    variables = {variable for option in TABLE for variable in option.variables}

    assert [name for name in TORCHRUN if f"PET_{name.upper()}" not in variables] == []


def test_no_two_options_share_a_name():
    for names in (flags(PLAN_TABLE), [v for o in PLAN_TABLE for v in o.variables]):
        assert len(names) == len(set(names))


def test_help_lines_are_noun_phrases():
    for option in PLAN_TABLE:
        assert option.help[0].isupper() or option.help.startswith("--")
        assert option.help.endswith(".")


@pytest.mark.parametrize("verb", VERBS.values(), ids=list(VERBS))
def test_each_verb_is_where_the_table_says(verb):
    module, _, function = verb.place.partition(":")

    assert callable(getattr(importlib.import_module(module), function))


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "82")


@pytest.mark.usefixtures("narrow")
def test_help(msrun):
    outcome = msrun("--help")

    if "REWRITE" in os.environ:
        HELP.write_text(outcome.out)
    assert (outcome.code, outcome.err, outcome.out) == (0, "", HELP.read_text())


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("line", ["run --help", "-h", "--nproc-per-node 2 --help", "run -h x"])
def test_help_is_the_same_everywhere(msrun, line):
    assert msrun(line).out == HELP.read_text()


@pytest.mark.parametrize("columns", [20, 80, 100, 200])
def test_help_fits(msrun, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))

    lines = msrun("--help").out.splitlines()

    assert max(map(len, lines)) <= max(60, min(100, columns))


def test_help_of_plan(msrun):
    out = msrun("plan --help").out

    assert out.startswith("Usage: msrun plan [OPTIONS] SCRIPT [ARGS]...\n")
    assert "\nPlan:\n  --all  " in out


@pytest.mark.parametrize("line", ["--version", "run --version", "plan --version"])
def test_version(msrun, line):
    outcome = msrun(line)

    assert (outcome.code, outcome.out, outcome.err) == (0, f"msrun {__version__}\n", "")


def test_help_loads_little():
    code = (
        "import sys; from msrun.cli.main import main; main(['--help']); "
        "heavy = {'rich', 'yaml', 'psutil', 'zmq', 'torch', 'numpy'}; "
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )

    assert _said(code) == "[]\n"


def test_an_agent_loads_what_most_jobs_need():
    """Each module costs every start; what another process does, or few jobs ask for, is absent."""
    code = (
        "import sys; import msrun.cli.job.prepare, msrun.processes.agent.agent; "
        "rare = {'msrun.processes.scheduler.scheduler', 'msrun.cluster.scheduler.peers', "
        "'msrun.cli.job.fleet', 'ranktable'}; "
        "print(sorted(rare & set(sys.modules)), file=sys.stderr)"
    )

    assert _said(code) == "[]\n"


def _said(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stderr
