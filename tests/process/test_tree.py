"""A node's real process tree: what its workers inherit, and that nothing outlives it."""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from msrun.supervise import process
from msrun.supervise.channel import ChannelClosed
from msrun.supervise.orders import (
    Configure,
    Exited,
    ForkserverExited,
    LiveUntil,
    Ready,
    SignalWorkers,
    Spawned,
    SpawnWorker,
    Sweep,
    Swept,
)
from msrun.supervise.tree import ProcessTree, end_strays

pytestmark = pytest.mark.process

PATIENCE = 20


class Node:
    """The agent's part of a node, with what it has been told so far."""

    def __init__(self, directory, source, *, kind="script", argv=(), preload=(), fork=True):
        (directory / "x.py").write_text(textwrap.dedent(source))
        self.directory = directory
        self.reports = []
        self.ended = False
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.lock_file = directory / "lock"
        lock = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = Configure(
            job_id="j",
            kind=kind,
            argv=["x.py", *argv] if kind == "script" else list(argv),
            cwd=str(directory),
            run_dir=str(self.run_dir),
            threads="1",
            preload=list(preload),
            fork=fork,
        )
        with socket.create_server(("127.0.0.1", 0)) as listen:
            self.tree = ProcessTree(configure, [listen], os.environ, lock=lock)
        os.close(lock)

    def wait_for(self, kind, channel="forkserver"):
        """Return the oldest report of type `kind` that was not returned yet."""
        source = getattr(self.tree, channel)
        deadline = time.monotonic() + PATIENCE
        while True:
            for report in self.reports:
                if isinstance(report, kind):
                    self.reports.remove(report)
                    return report
            if not select.select([source], [], [], max(0, deadline - time.monotonic()))[0]:
                pytest.fail(f"no {kind.__name__}; the log has {self.log()!r}")
            self.reports += source.receive()

    def spawn(self, rank=0, *, until=None):
        order = SpawnWorker(
            generation=0,
            rank=rank,
            env=dict(os.environ),
            log_file=str(self.log_file(rank)),
            until=until,
        )
        self.tree.forkserver.send(order)

    def let_live(self, seconds):
        """Give the order that an agent gives when the scheduler has answered; return its time."""
        until = time.monotonic() + seconds
        self.tree.reaper.send(LiveUntil(generation=0, at=until))
        return until

    def log_file(self, rank=0):
        return self.directory / f"worker_{rank}.log"

    def log(self, rank=0):
        path = self.log_file(rank)
        return path.read_text() if path.exists() else ""

    def wait_for_log(self, text, rank=0, *, count=1):
        deadline = time.monotonic() + PATIENCE
        while self.log(rank).count(text) < count:
            assert time.monotonic() < deadline, self.log(rank)
            select.select([], [], [], 0.005)

    def end(self):
        """Return what could not be killed; nothing more happens when it has ended already."""
        if self.ended:
            return None
        self.ended = True
        return self.tree.end(PATIENCE)

    def abandon(self):
        """Do what the kernel does when the agent is killed."""
        self.ended = True
        self.tree.reaper.close()
        self.tree.forkserver.close()
        self.tree._process.wait(PATIENCE)

    def is_locked(self):
        with self.lock_file.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False


@pytest.fixture
def start(tmp_path):
    started = []

    def start_node(source="", **options):
        started.append(Node(tmp_path, source, **options))
        return started[-1]

    yield start_node
    for node in started:
        node.end()


def code_of(end):
    return os.waitstatus_to_exitcode(end.status)


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "started"])
def test_a_worker_runs_its_script_and_its_end_is_reported(start, fork):
    node = start("import sys\nprint(__name__, sys.argv)\nsys.exit(3)", argv=["a"], fork=fork)
    ready = node.wait_for(Ready)
    node.spawn()
    spawned, end = node.wait_for(Spawned), node.wait_for(Exited)

    assert (ready.fork, ready.error, code_of(end)) == (fork, None, 3)
    assert (end.rank, end.pid) == (0, spawned.pid)
    assert node.log() == "__main__ ['x.py', 'a']\n"


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "started"])
def test_a_worker_has_only_the_standard_descriptors(start, fork):
    source = "import os\nprint([os.readlink(f'/proc/self/fd/{n}') for n in range(3)])\n"
    source += "print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    node = start(source, fork=fork)
    node.spawn()
    node.wait_for(Exited)

    assert node.log() == f"{['/dev/null', *[str(node.log_file())] * 2]}\n[0, 1, 2]\n"


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "started"])
def test_a_worker_has_the_signals_of_a_fresh_process(start, fork):
    source = """\
        import signal

        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        print({s.name for s in signal.valid_signals() if isinstance(s, signal.Signals)
               and signal.getsignal(s) is signal.SIG_IGN} - {"SIGPIPE", "SIGXFSZ"})
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """
    node = start(source, fork=fork)
    node.spawn()
    node.wait_for(Exited)

    assert node.log() == "set()\nset()\nTrue\n"


@pytest.mark.parametrize("group", [False, True], ids=["a process", "a group"])
def test_a_signal_right_after_the_start_is_not_lost(start, group):
    node = start("import signal\nsignal.pause()")
    node.wait_for(Ready)
    for rank in range(8):
        node.spawn(rank)
        node.tree.forkserver.send(SignalWorkers(ranks=[rank], signum=signal.SIGTERM, group=group))
    codes = [code_of(node.wait_for(Exited)) for _ in range(8)]

    assert codes == [-signal.SIGTERM] * 8


def test_a_signal_reaches_the_ranks_it_is_for(start):
    node = start("import signal\nprint('runs')\nsignal.pause()")
    for rank in range(3):
        node.spawn(rank)
        node.wait_for_log("runs", rank)
    node.tree.forkserver.send(SignalWorkers(ranks=[1, 7], signum=signal.SIGUSR1))
    end = node.wait_for(Exited)

    assert (end.rank, code_of(end)) == (1, -signal.SIGUSR1)


def test_a_command_is_run_as_it_is(start):
    node = start(kind="command", argv=["/bin/sh", "-c", "echo $0 $1; exit 4", "a", "b c"])
    node.spawn()

    assert code_of(node.wait_for(Exited)) == 4
    assert node.log() == "a b c\n"


@pytest.mark.parametrize(
    ("command", "code", "problem"),
    [
        ("no-such-program-anywhere", 127, "[Errno 2] No such file or directory"),
        ("/", 126, "[Errno 13] Permission denied"),
    ],
)
def test_a_command_that_cannot_be_started_says_so(start, command, code, problem):
    node = start(kind="command", argv=[command])
    node.spawn()

    assert code_of(node.wait_for(Exited)) == code
    assert node.log() == f"msrun: cannot start rank 0: {problem}\n"


def test_a_module_that_cannot_be_imported_is_named(start):
    node = start(preload=["json", "no_such_module_anywhere"])
    expected = (
        "cannot import no_such_module_anywhere: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )

    assert node.wait_for(Ready).error == expected


def test_a_command_line_of_any_length_reaches_the_worker(start):
    node = start("import sys\nprint(len(sys.argv[1]))", argv=["x" * 300_000])
    node.spawn()
    node.wait_for(Exited)

    assert node.log() == "300000\n"


STRAYS = """\
    import os, signal

    for session in (True, False):
        if os.fork() == 0:
            if session:
                os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() != 0:
                os._exit(0)
            os.write(1, f"stray {os.getpid()}\\n".encode())
            signal.pause()
    os.wait()
    os.wait()
    os.write(1, b"done\\n")
    """
STRAYS_BESIDE_A_WORKER = STRAYS + "signal.pause()\n    "


def strays(node):
    lines = [line.split() for line in node.log().splitlines()]
    return [int(words[1]) for words in lines if words[0] == "stray"]


def test_a_sweep_ends_what_a_worker_left_behind_and_spares_the_forkserver(start):
    node = start(STRAYS)
    node.spawn()
    node.wait_for(Exited)
    node.wait_for_log("stray", count=2)
    node.tree.reaper.send(Sweep(generation=0))
    swept = node.wait_for(Swept, "reaper")
    node.spawn(1)

    assert swept == Swept(generation=0, stuck=[])
    assert [pid for pid in strays(node) if process.is_alive(pid)] == []
    assert code_of(node.wait_for(Exited)) == 0


def test_workers_live_as_long_as_the_agent_says_and_no_longer(start):
    node = start(STRAYS_BESIDE_A_WORKER)
    node.spawn()
    node.wait_for_log("done")
    node.wait_for_log("stray", count=2)
    watches = [os.pidfd_open(pid) for pid in strays(node)]
    node.let_live(0.5)
    until = node.let_live(1.5)
    end = node.wait_for(Exited)
    ended = [bool(select.select([watch], [], [], PATIENCE)[0]) for watch in watches]
    for watch in watches:
        os.close(watch)
    # Whoever is started before the reaper has done its killing is killed with the rest.
    node.tree.reaper.send(Sweep(generation=0))
    node.wait_for(Swept, "reaper")
    node.spawn(1)

    assert (code_of(end), end.at >= until, ended) == (-signal.SIGKILL, True, [True, True])
    node.wait_for_log("done", 1)


def test_a_worker_whose_time_is_over_is_not_started(start):
    node = start("print('up')")
    node.spawn(until=time.monotonic())
    end = node.wait_for(Exited)

    assert (code_of(end), end.reason, node.log()) == (126, "the node was cut off meanwhile", "")


def test_the_end_leaves_nothing_and_gives_up_the_lock_last(start):
    node = start(STRAYS_BESIDE_A_WORKER)
    node.spawn()
    node.wait_for_log("done")
    pids = [node.tree.pid, *process.descendants(node.tree.pid)]
    before = node.is_locked()

    assert node.end() == []
    assert (before, node.is_locked(), node.run_dir.exists()) == (True, False, False)
    assert [pid for pid in pids if process.is_alive(pid)] == []


def test_an_agent_that_is_gone_ends_the_tree(start):
    node = start(STRAYS_BESIDE_A_WORKER)
    node.spawn()
    node.wait_for_log("done")
    watches = [os.pidfd_open(p) for p in [node.tree.pid, *process.descendants(node.tree.pid)]]
    node.abandon()
    ended = [bool(select.select([watch], [], [], PATIENCE)[0]) for watch in watches]
    for watch in watches:
        os.close(watch)

    assert ended == [True] * len(watches)
    assert (node.is_locked(), node.run_dir.exists()) == (False, False)


def is_closed(channel):
    """Read until the peer is gone, at most for a while."""
    try:
        while select.select([channel], [], [], PATIENCE)[0]:
            channel.receive()
    except ChannelClosed:
        return True
    return False


def test_the_forkservers_death_is_reported_and_ends_the_workers(start):
    node = start("import signal\nprint('runs')\nsignal.pause()")
    node.spawn()
    node.wait_for_log("runs")
    worker = node.wait_for(Spawned).pid
    (forkserver,) = process.children(node.tree.pid)
    watch = os.pidfd_open(worker)
    os.kill(forkserver, signal.SIGKILL)
    ended = bool(select.select([watch], [], [], PATIENCE)[0])
    os.close(watch)

    assert node.wait_for(ForkserverExited, "reaper").status == signal.SIGKILL
    assert ended
    assert is_closed(node.tree.forkserver)


@pytest.mark.parametrize("is_over", [False, True])
def test_nothing_outlives_a_killed_reaper_by_force(start, is_over):
    """Neither while the job runs, nor where the reaper is killed after it was told to end all."""
    cookie = "MSRUN_TEST_TREE"
    os.environ[cookie] = str(os.getpid())
    try:
        node = start(STRAYS)
        node.spawn()
        node.wait_for_log("done")
    finally:
        del os.environ[cookie]
    node.wait_for_log("stray", count=2)
    watches = [os.pidfd_open(pid) for pid in strays(node)]
    os.kill(node.tree.pid, signal.SIGKILL)
    variable = f"{cookie}={os.getpid()}".encode()
    if is_over:
        node.ended = True
        assert node.tree.end(PATIENCE, variable) == []
    else:
        node.tree.kill_by_force(variable)
    ended = [bool(select.select([watch], [], [], PATIENCE)[0]) for watch in watches]
    for watch in watches:
        os.close(watch)

    assert ended == [True, True]
    assert Path(node.run_dir).exists() != is_over


FORKS = """
    import os, time

    print("up", flush=True)
    for _ in range(2000):
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(0.0002)
"""


def test_what_strays_fork_while_they_are_listed_is_killed_too(tmp_path):
    cookie = f"MSRUN_TEST_STRAY={tmp_path.name}-{os.getpid()}"
    name, value = cookie.split("=")
    command = [sys.executable, "-c", textwrap.dedent(FORKS)]
    env = os.environ | {name: value}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as stray:
        assert stray.stdout.readline() == b"up\n"
        end_strays(cookie.encode(), None)

        left = process.with_variable(cookie.encode())
        process.kill_and_wait(left, PATIENCE)
    assert left == []
