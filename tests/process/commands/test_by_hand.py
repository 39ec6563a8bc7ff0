"""One script in many terminals: MS_ROLE and its neighbours make a cluster of its processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from support import PATIENCE, kill, script, until
from terminals import JOIN, TELL

pytestmark = pytest.mark.process

WAIT = """
while True:
    time.sleep(0.01)
"""


TRAIN = """
    import os, sys
    print("begins", flush=True)
    import msrun
    msrun.join()
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1) + dist.get_rank()
    dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MS_ROLE")
    print("sum", total.item(), *(os.environ[name] for name in names), *sys.argv[1:], flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("first", [pytest.param("MS_SCHED", marks=pytest.mark.slow), "MS_WORKER"])
def test_the_same_script_in_each_terminal_is_one_job(cluster, tmp_path, first):
    words = (script(tmp_path, TRAIN), "--lr", "3")
    numbers = {"MS_SCHED": 1, "MS_WORKER": 4}
    for role in sorted(numbers, key=lambda role: role != first):
        for _ in range(numbers[role]):
            cluster.start(role, *words).until_said("msrun: by-hand-")

    assert [process.wait(90) for process in cluster.processes] == [0] * 5
    scheduler = cluster.processes[0 if first == "MS_SCHED" else -1]
    workers = [process for process in cluster.processes if process is not scheduler]
    assert sorted(worker.out.splitlines()[-1] for worker in workers) == [
        f"[rank {rank}] sum 10.0 {rank} 4 {rank} 4 MS_WORKER --lr 3" for rank in range(4)
    ]
    assert scheduler.out == "begins\n"
    assert "msrun: 4/4 workers finished after" in scheduler.err
    assert all("the script begins again as a worker" in worker.err for worker in workers)


def test_the_runtime_joins_by_itself_before_it_imports_torch(cluster, tmp_path):
    (tmp_path / "package").mkdir()
    program = """
        import sys, msrun
        print("torch" in sys.modules, flush=True)
        with msrun.init() as rt:
            import torch
            print(rt.rank, rt.world_size, rt.mean_over_data(torch.ones(1) + rt.rank).item())
    """
    script(tmp_path / "package", program, name="train.py")
    cluster.start("MS_SCHED", "-m", "package.train", workers=2)
    workers = [
        cluster.start("MS_WORKER", "-m", "package.train", workers=2, MS_NODE_ID=f"0{i}")
        for i in range(2)
    ]

    assert [process.wait(90) for process in cluster.processes] == [0, 0, 0]
    for rank, worker in enumerate(workers):
        assert worker.out.splitlines()[0] == "False"
        assert worker.out.splitlines()[-1] == f"[rank {rank}] {rank} 2 1.5"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ids", "ranks"),
    [
        (("3", "0", "02", "1"), ("3", "0", "2", "1")),
        (("w10", "w9", "w1", "a"), ("2", "3", "1", "0")),
        (("worker_b", "0", "worker_a", "worker_c"), ("2", "0", "1", "3")),
    ],
)
def test_a_number_is_the_rank_and_names_follow_in_their_order(cluster, ids, ranks):
    workers = [cluster.worker(TELL, MS_NODE_ID=node_id) for node_id in ids]
    cluster.scheduler(TELL, MS_NODE_ID="sched")

    assert cluster.codes() == [0] * 5
    assert [worker.out for worker in workers] == [
        f"[rank {rank}] {rank} 4 {rank} 4 {rank}\n" for rank in ranks
    ]


def test_one_worker_and_a_scheduler_are_a_cluster(cluster):
    cluster.scheduler(TELL, workers=1)
    worker = cluster.worker(TELL, workers=1)

    assert cluster.codes() == [0, 0]
    assert worker.out == "[rank 0] 0 1 0 1 0\n"


def test_options_of_python_and_arguments_are_those_of_the_worker(cluster, tmp_path):
    begin = "print(sys.flags.utf8_mode, sys.warnoptions, sys.argv[1:])"
    words = ("-Xutf8", "-u", "-W", "ignore", script(tmp_path, f"{JOIN}\n{begin}"), "-m", "--x=1")
    cluster.start("MS_SCHED", *words, workers=1)
    worker = cluster.start("MS_WORKER", *words, workers=1)

    assert cluster.codes() == [0, 0]
    assert worker.out == "[rank 0] 1 ['ignore'] ['-m', '--x=1']\n"


def test_the_first_failure_is_the_result_of_every_process(cluster):
    code = f"{JOIN}\nos.environ['RANK'] == '2' and sys.exit(3)\n{WAIT}"
    scheduler = cluster.scheduler(code)
    for _ in range(4):
        cluster.worker(code)

    assert cluster.codes() == [3] * 5
    for process in cluster.processes:
        assert "error: rank 2 (node" in process.err
        assert "exited with code 3" in process.err
    assert "local_rank 2" in scheduler.err


@pytest.mark.sampled
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("receiver", [0, 2])
def test_a_signal_to_any_process_stops_the_job(cluster, signum, receiver):
    code = f"{JOIN}\nprint('up', flush=True)\n{WAIT}"
    cluster.scheduler(code, workers=2)
    workers = [cluster.worker(code, workers=2) for _ in range(2)]
    for worker in workers:
        worker.until_said("] up")
    cluster.processes[receiver].process.send_signal(signum)

    assert cluster.codes() == [128 + signum] * 3
    for process in cluster.processes:
        assert f"error: stopped by {signum.name}" in process.err


def test_the_job_can_be_controlled_where_its_scheduler_is(cluster):
    scheduler = cluster.scheduler(TELL)
    scheduler.until_said("scheduler of 4 worker(s) at")
    stop = subprocess.run(
        [sys.executable, "-m", "msrun", "stop"],
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )

    print(stop)
    assert scheduler.wait() == 143
    assert "error: stopped by `msrun stop`" in scheduler.err


def test_a_signal_stops_a_scheduler_that_waits_for_workers(cluster):
    scheduler = cluster.scheduler(TELL)
    scheduler.until_said("scheduler of 4 worker(s) at")
    scheduler.process.terminate()

    assert scheduler.wait() == 143
    assert "error: stopped by SIGTERM" in scheduler.err


@pytest.mark.slow
def test_a_missing_worker_ends_the_others_at_the_deadline(cluster):
    for _ in range(2):
        cluster.worker(TELL, MSRUN_JOIN_TIMEOUT="40s").until_said("waiting for the scheduler")
    cluster.scheduler(TELL, MS_TOPO_TIMEOUT="4")

    assert cluster.codes() == [121] * 3
    for process in cluster.processes:
        assert "error: 2 of 4 workers registered" in process.err
        assert "after 4s" in process.err


def test_a_missing_scheduler_is_named_at_the_deadline(cluster):
    worker = cluster.worker(TELL, MS_TOPO_TIMEOUT="1")

    assert worker.wait() == 121
    assert f"127.0.0.1:{cluster.port}" in worker.err


@pytest.mark.slow
def test_a_scheduler_that_dies_is_started_again_and_the_job_goes_on(cluster, tmp_path):
    code = f"{JOIN}\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)"
    scheduler = cluster.scheduler(code, workers=2)
    workers = [cluster.worker(code, workers=2) for _ in range(2)]
    for worker in workers:
        worker.until_said("] up")
    (child,) = psutil.Process(scheduler.process.pid).children()
    kill(child)
    scheduler.until_said("was killed by SIGKILL")
    (tmp_path / "go").touch()

    assert cluster.codes() == [0, 0, 0]
    assert "it is started again" in scheduler.err


def test_everybody_learns_a_verdict_that_outlives_its_scheduler(cluster, tmp_path, runtime):
    fail = tmp_path / "fail"
    body = f"while not os.path.exists({str(fail)!r}): time.sleep(0.01)"
    code = f"{JOIN}\nprint('up', flush=True)\n{body}\nos._exit(3 * int(os.environ['RANK']))"
    scheduler = cluster.scheduler(code, workers=2)
    workers = [cluster.worker(code, workers=2, MS_NODE_ID=rank) for rank in range(2)]
    for worker in workers:
        worker.until_said("] up")
    spare = cluster.worker(code, workers=2)
    spare.until_said("stands by as a spare")
    spare.process.send_signal(signal.SIGSTOP)
    (log,) = runtime.rglob("scheduler.wal")
    (child,) = psutil.Process(scheduler.process.pid).children()
    fail.touch()
    until(lambda: b"Decided" in log.read_bytes(), "for the verdict", pause=0)
    kill(child)
    scheduler.until_said("it is started again")  # else the spare may know from the first one
    spare.process.send_signal(signal.SIGCONT)

    assert cluster.codes() == [3, 3, 3, 3]


def test_a_worker_that_is_killed_with_its_launcher_ends_the_job(cluster):
    code = f"{JOIN}\nprint('up', flush=True)\n{WAIT}"
    cluster.scheduler(code, workers=2)
    workers = [cluster.worker(code, workers=2) for _ in range(2)]
    for worker in workers:
        worker.until_said("] up")
    workers[0].process.kill()

    assert cluster.codes() == [120, 137, 120]
    assert "was lost" in workers[1].err


def test_a_process_started_anew_takes_the_place_of_one_that_was_killed(cluster):
    code = f"""{JOIN}
print("up", *(os.environ[n] for n in ("RANK", "MSRUN_GENERATION")), flush=True)
while os.environ["MSRUN_GENERATION"] == "0":
    time.sleep(0.01)
"""
    options = {"workers": 2, "MSRUN_MAX_RESTARTS": 1}
    cluster.scheduler(code, **options)
    first, second = [cluster.worker(code, MS_NODE_ID=rank, **options) for rank in range(2)]
    first.until_said("up 0 0")
    second.until_said("up 1 0")
    second.process.kill()
    first.until_said("was lost")
    third = cluster.worker(code, MS_NODE_ID=1, **options)

    assert cluster.codes() == [0, 0, 137, 0]
    assert "[rank 0] up 0 1" in first.out
    assert third.out == "[rank 1] up 1 1\n"


def test_a_rank_that_is_taken_is_refused(cluster):
    code = f"{JOIN}\nprint('up', flush=True)\n{WAIT}"
    scheduler = cluster.scheduler(code, workers=2)
    first = cluster.worker(code, workers=2, MS_NODE_ID=1)
    first.until_said("of 2 workers registered")
    second = cluster.worker(code, workers=2, MS_NODE_ID=1)

    assert second.wait() == 2
    assert "MS_NODE_ID 1 of node" in second.err
    assert "already" in second.err
    scheduler.process.terminate()
    assert (scheduler.wait(), first.wait()) == (143, 143)


def test_a_process_with_another_secret_is_refused(cluster, tmp_path):
    scheduler = cluster.scheduler(TELL, workers=1)
    stranger = cluster.worker(TELL, workers=1, XDG_CONFIG_HOME=tmp_path / "of-another")

    assert stranger.wait() == 122
    cluster.worker(TELL, workers=1).wait()
    assert scheduler.wait() == 0


def test_one_worker_too_many_stands_by(cluster, tmp_path):
    code = f"{JOIN}\nwhile not os.path.exists('go'): time.sleep(0.01)"
    cluster.scheduler(code, workers=1)
    cluster.worker(code, workers=1).until_said("running 1/1")
    cluster.worker(code, workers=1).until_said("stands by as a spare")
    (tmp_path / "go").touch()

    assert cluster.codes() == [0, 0, 0]


def test_files_of_the_script_do_not_outlive_it(cluster, tmp_path):
    held = tmp_path / "held"
    begin = f"file = open({str(held)!r}, 'w'); import os; os.set_inheritable(file.fileno(), True)"
    cluster.scheduler(f"{begin}\n{JOIN}", workers=1)
    worker = cluster.worker(f"{begin}\n{JOIN}\nprint('up', flush=True)\n{WAIT}", workers=1)
    worker.until_said("] up")
    files = [psutil.Process(process.process.pid).open_files() for process in cluster.processes]
    worker.process.terminate()

    assert cluster.codes() == [143, 143]
    assert str(held) not in [file.path for found in files for file in found]


def test_a_worker_of_a_launcher_has_its_place_already(msrun, tmp_path):
    job = msrun("--workers-per-node", 2, "--tail", "all", "--no-python", sys.executable, "-c", TELL)

    assert job.wait() == 0
    assert job.log(0) == "0 2 0 2 0\n"
    variables = json.dumps({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    code = f"import json, os; os.environ |= json.loads({variables!r}); {JOIN}; print('still here')"
    env = {**os.environ, "MS_ROLE": "MS_WORKER"}
    torchrun = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert torchrun.stdout == "still here\n"
