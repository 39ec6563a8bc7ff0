"""One promise for all backends, across hosts: verdict, code, and nothing left running.

`tests/process/commands/test_fleet.py` has what one host can show.
"""

import contextlib
import os
import re
import signal
import sys

import hosts
import mpi
import pytest
import sites
from conftest import skip_without
from support import script, shell, until

from ranktable import Inventory, InventoryDevice, build_table, render_table

pytestmark = pytest.mark.process
REDUCE = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.tensor(dist.get_rank())
    dist.all_reduce(ranks)
    print(ranks.item())
    dist.destroy_process_group()
"""
MEET = """
    import msrun
    import torch
    import torch.distributed as dist

    rt = msrun.init()
    ranks = torch.tensor(rt.rank)
    dist.all_reduce(ranks)
    if rt.rank == 0:
        print(ranks.item())
"""


def rows(*slow):
    return [pytest.param(b, marks=[pytest.mark.slow] * (b in slow)) for b in sites.BACKENDS]


# The wheels' mpiruns are newer than Debian's: CI shows what matters most of them, `slow` all.
ROWS = rows(*mpi.WHEELS)
# MPICH's, Intel's and Debian's are one program, and Open MPI 5 alone says 0 when a node is lost.
ESSENTIAL = pytest.mark.parametrize("site_of_all", rows("mpich", "impi-rt"), indirect=True)
# Of every mpirun one host shows as much.
ALSO_ON_ONE_HOST = pytest.mark.parametrize("site_of_all", rows(*mpi.ALL), indirect=True)
# Of Slurm a job that goes on without the lost node shows it, below.
LOST = pytest.mark.parametrize("backend", rows("mpirun.openmpi", "mpich", "impi-rt", "slurm"))
STARTS_RANKS = pytest.mark.parametrize(
    "site_of_all",
    [b for b in rows("mpirun.openmpi", "mpich", "impi-rt") if b.values[0] in mpi.ALL],
    indirect=True,
)
# Debian's MPICH has a test of its own, in which they have to know more.
BY_MPI = pytest.mark.parametrize(
    "site_of_all",
    [b for b in rows("mpirun.mpich", *mpi.WHEELS) if b.values[0] in mpi.ALL],
    indirect=True,
)
WAIT = "touch ready.$RANK; sleep 60 & wait"


def open_here(backend, folder):
    skip_without("lab of hosts", hosts.missing())
    skip_without(backend, sites.missing(backend))
    return sites.open_site(backend, folder)


@pytest.fixture(scope="module", params=ROWS)
def site_of_all(request, tmp_path_factory):
    with open_here(request.param, tmp_path_factory.mktemp("s")) as site:
        yield site


@pytest.fixture
def site(site_of_all):
    """A head and two nodes, on which nothing runs before and after the test."""
    with watching(site_of_all) as site:
        yield site


@contextlib.contextmanager
def watching(site):
    """End what a test leaves, print all that its jobs have said, and wait for the end of all."""
    site.jobs.clear()
    site.use_own_python()
    try:
        yield site
    finally:
        for job in site.jobs:
            job.process.kill()
            job.process.wait()
            print(f"======== {job.name}, exit code {job.process.returncode}\n{job.report()}")
            print(f"== console\n{job.console}")
    site.await_nothing()


@ESSENTIAL
@pytest.mark.few(1)
def test_ranks_of_two_hosts_train_together(site):
    if site.backend != "ssh":  # one is enough of what takes a while
        job = site.start(script(site.lab.folder, REDUCE))
        assert (job.wait(60), job.log(0).splitlines()[-1]) == (0, "6")
        return
    job = site.start("--env", "OMP_NUM_THREADS=1", sites.HOME / "examples/train_digits.py")

    assert job.wait(60) == 0
    accuracy = re.search(r"accuracy (\d\.\d+) at 4 workers", job.log(0))
    assert accuracy
    assert float(accuracy[1]) >= 0.95


@pytest.mark.few(1)
def test_ranks_follow_the_nodes_and_the_first_is_heard(site):
    job = site.start_shell('echo "rank $RANK of $WORLD_SIZE on $(hostname)"', "--tail", "0")

    assert job.wait() == 0
    lines = [f"rank {rank} of 4 on {'ab'[rank // 2]}\n" for rank in range(4)]
    assert [job.log(rank) for rank in range(4)] == lines
    assert lines[0] in job.console


@pytest.mark.few(1)
@ALSO_ON_ONE_HOST
def test_the_code_is_the_first_failing_workers(site):
    job = site.start_shell(f"[ $RANK = 3 ] && exit 3; {WAIT}")

    assert job.wait() == 3
    assert root(job) == (3, "b", 3, None)
    assert "rank 3 (node b, local_rank 1" in job.console


@pytest.mark.few(1)
@ALSO_ON_ONE_HOST
def test_a_worker_that_is_killed(site):
    job = site.start_shell(f"[ $RANK = 2 ] && kill -9 $$; {WAIT}")

    assert job.wait() == 137
    assert root(job) == (2, "b", 137, 9)


@pytest.mark.few(1)
@ALSO_ON_ONE_HOST
def test_a_worker_that_is_killed_is_started_again(site):
    text = "[ $RANK$TORCHELASTIC_RESTART_COUNT = 20 ] && kill -9 $$; sleep 0.1"
    job = site.start_shell(text, "--max-restarts", "1")

    assert job.wait() == 0
    verdict = job.verdict()
    assert (verdict["code"], verdict["generation"], verdict["restarts"]) == (0, 1, 1)


@ESSENTIAL
@pytest.mark.few(1)
def test_an_agent_that_is_killed_is_a_lost_node(site):
    job = site.start_shell(WAIT)
    job.await_ready()

    os.kill(site.agent(site.nodes[1]), signal.SIGKILL)

    assert job.wait() == 120
    assert "node b" in job.verdict()["reason"]


@ESSENTIAL
@pytest.mark.few(1)
def test_a_signal_to_the_head_ends_all(site):
    job = site.start_shell(WAIT)
    job.await_ready()

    job.send(signal.SIGTERM)

    assert job.wait() == 143
    site.await_nothing()


@pytest.mark.few(1)
def test_a_head_that_is_killed_takes_all_agents_with_it(site):
    job = site.start_shell(WAIT)
    job.await_ready()

    job.send(signal.SIGKILL)

    if site.backend == "slurm":  # which has the job, whoever follows it
        assert job.wait() == 137
        site.cancel(job)
    site.await_nothing()


@pytest.mark.few(3)
def test_a_node_with_another_msrun_is_named(site):
    older = "import sys, msrun.version as ours; ours.__version__ = '0.0'"
    code = f"{older}; from launchers.remote import main; sys.exit(main(sys.argv[1:]))"
    is_odd = '[ "$(hostname)$3" = blaunchers.remote ]'
    site.use_own_python(f'{is_odd} && set -- -c "{code}"')
    job = site.start_shell(WAIT)

    assert job.wait() == 2
    assert "node b: msrun is 0.0 here" in job.console


@ESSENTIAL
def test_a_plan_names_every_command_and_starts_nothing(site):
    plan = site.plan("train.py")

    assert plan.returncode == 0, plan.stderr
    assert "-P -m launchers.remote" in plan.stdout
    assert not site.leftovers()


@pytest.mark.few(1)
@LOST
def test_a_host_that_loses_power_ends_the_job(backend, tmp_path):
    with open_here(backend, tmp_path) as own, watching(own) as site:
        job = site.start_shell(WAIT, "--lease", "2s")
        job.await_ready()

        site.nodes[1].power_off()

        assert job.wait(60) == 120
        assert "node b" in job.verdict()["reason"]


@pytest.mark.slow
def test_slurm_waits_for_a_lost_node_and_the_job_that_goes_on_without_it_ends(tmp_path):
    with open_here("slurm", tmp_path) as own, watching(own) as site:
        words = ["--nnodes", "1:2", "--lease", "2s", "--max-restarts", "1"]
        job = site.start_shell(f"[ $WORLD_SIZE = 2 ] || {{ {WAIT}; }}", *words)
        job.await_ready()

        site.nodes[1].power_off()

        assert job.wait(45) == 0
        assert job.verdict()["generation"] == 1


@pytest.mark.slow
def test_srun_with_a_limit_does_not_wait_for_a_lost_node(tmp_path):
    with open_here("slurm", tmp_path) as site:
        folder, (_, lost) = site.folder(), site.nodes
        srun = ["srun", "-N2", "--ntasks-per-node=1", "--wait=5"]
        msrun = [site.python, "-m", "msrun", "--workers-per-node", "2", "--lease", "2s"]
        with (folder / "console").open("w") as console:
            command = [*srun, *msrun, *shell(WAIT)]
            job = site.head.popen(command, cwd=folder, env=site.env, stderr=console)
            until(lambda: len(list(folder.glob("ready.*"))) == 4, "for 4 workers")

            lost.power_off()

            assert job.wait(60) == 120
        assert "error: node b was lost" in (folder / "console").read_text()


@pytest.mark.few(1)
@STARTS_RANKS
def test_ranks_that_mpirun_starts_meet_without_a_master_address(site):
    open_mpi = ["--allow-run-as-root", "--bind-to", "none", "--host"]
    is_open_mpi = "openmpi" in site.backend  # whose mpirun has to be on the node of rank 0
    host, words = (site.nodes[0], open_mpi) if is_open_mpi else (site.head, ["-hosts"])
    mpirun = [mpi.program(site.backend), *words, "a:2,b:2", "-n", "4"]

    done = site.run(*mpirun, site.python, script(site.lab.folder, MEET), host=host, seconds=60)

    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


@pytest.mark.slow
@BY_MPI
def test_ranks_by_mpi_meet_on_the_first_host(site):
    done = start_ranks(site)

    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


@pytest.mark.slow
def test_ranks_meet_where_each_host_has_its_name_as_loopback(tmp_path):
    with open_here("mpirun.mpich", tmp_path) as site:
        for host in site.nodes:  # as Debian installs them
            file = site.lab.folder / "etc" / host.name
            others = [line for line in file.read_text().splitlines() if line[-1] != host.name]
            file.write_text("\n".join([f"127.0.1.1 {host.name}", *others, ""]))

        done = start_ranks(site)

    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


def start_ranks(site):
    """Have mpirun start two ranks a node, from the command line of msrun, and wait for them."""
    words = ["--launcher", "mpirun", "--mpirun", mpi.program(site.backend), "--ranks-by", "mpi"]
    nodes = ["--hostfile", "hosts", "--remote-python", site.python]
    msrun = [sys.executable, "-m", "msrun", *words, *nodes]
    return site.run(*msrun, script(site.lab.folder, MEET), seconds=60)


def test_a_rank_table_names_the_nodes_and_workers_are_told_of_it(tmp_path):
    with open_here("ssh", tmp_path) as site:
        path = site.lab.folder / "t.json"
        devices = tuple(InventoryDevice(device_id=number) for number in range(2))
        servers = [Inventory(server_id=host.ipv4, devices=devices) for host in site.nodes]
        path.write_text(render_table(build_table(servers)))
        words = ["--launcher", "ssh", "--rank-table-file", path, "--remote-python", site.python]
        tell = f'echo "$(hostname) $RANK_TABLE_FILE" > {site.lab.folder}/told.$RANK'
        msrun = [sys.executable, "-m", "msrun", *words, "--log-dir", site.lab.folder / "logs"]

        done = site.run(*msrun, *shell(tell))
        told = [(site.lab.folder / f"told.{rank}").read_text() for rank in range(4)]
        site.head.file("/dev/shm/t.json").write_bytes(path.read_bytes())
        msrun[msrun.index(path)] = "/dev/shm/t.json"
        refused = site.run(*msrun, *shell(tell))

    assert done.returncode == 0, done.stderr
    assert told == [f"{'ab'[rank // 2]} {path}\n" for rank in range(4)]
    assert refused.returncode == 2
    assert "rank table /dev/shm/t.json cannot be read here" in refused.stderr


def root(job):
    """Return rank, host, code and signal of the worker that the verdict blames."""
    verdict = job.verdict()
    found = verdict["root"]
    assert verdict["code"] == found["code"] or found["signum"]
    return found["rank"], found["host"], verdict["code"], found["signum"]
