"""What Linux says about processes and what they leave behind."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from msrun.supervise import process

pytestmark = pytest.mark.process

PATIENCE = 10

# Each level prints its pid, then waits until its standard input is closed.
TREE = """
import os, sys

def level(depth):
    print(os.getpid(), flush=True)
    if depth == 0:
        return sys.stdin.read()
    pid = os.fork()
    if pid == 0:
        if depth % 2:
            os.setsid()
        level(depth - 1)
        os._exit(0)
    sys.stdin.read()
    os.waitpid(pid, 0)

level(int(sys.argv[1]))
"""


@pytest.fixture
def start():
    """Start Python code and end it by closing its standard input."""
    started = []

    def start_python(code, *arguments, **options):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        child = subprocess.Popen(command, text=True, **pipes, **options)
        started.append(child)
        return child

    yield start_python
    for child in started:
        with child:
            child.kill() if child.returncode is None else None


def read_pids(child, count):
    return [int(child.stdout.readline()) for _ in range(count)]


def ended(pid):
    """Wait for the end of a process that need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([descriptor], [], [], PATIENCE)
    os.close(descriptor)
    return bool(ready)


def test_descendants_hold_grandchildren_in_sessions_of_their_own_parents_first(start):
    child = start(TREE, 3)
    pids = read_pids(child, 4)

    # Other tests of this process may have left it a child, such as a tracker of shared memory.
    assert [pid for pid in process.descendants(os.getpid()) if pid in pids] == pids
    assert list(process.descendants(child.pid)) == pids[1:]
    assert list(process.descendants(pids[-1])) == []
    child.stdin.close()
    child.wait(PATIENCE)


def test_children_are_found_with_and_without_the_kernels_list(start):
    child = start(TREE, 2)
    _, second, _ = read_pids(child, 3)

    assert process.children(child.pid) == [second]
    assert process._listed_children(child.pid) == [second]
    assert process._found_children(child.pid) == [second]
    child.stdin.close()
    child.wait(PATIENCE)


def test_a_child_that_a_thread_forked_is_a_child(start):
    code = """
import subprocess, sys, threading
def work():
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    sys.stdin.read()
    child.kill()
    child.wait()
threading.Thread(target=work).start()
"""
    child = start(code)
    pids = read_pids(child, 1)

    assert process.children(child.pid) == pids
    child.stdin.close()
    child.wait(PATIENCE)


def test_a_zombie_is_not_alive_and_no_descendant(start):
    code = """
import os, sys
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(pid, flush=True)
sys.stdin.read()
"""
    child = start(code)
    (zombie,) = read_pids(child, 1)

    assert (process.state(zombie), process.is_alive(zombie)) == ("Z", False)
    assert list(process.descendants(child.pid)) == []
    assert process.command_line(zombie) == ""


def test_a_process_whose_name_holds_a_bracket_is_read_right(start):
    code = """
import sys
with open("/proc/self/comm", "w") as name:
    name.write("a) Z (b")
print(1, flush=True)
sys.stdin.read()
"""
    child = start(code)
    read_pids(child, 1)

    assert process.is_alive(child.pid)
    assert Path(f"/proc/{child.pid}/comm").read_text() == "a) Z (b\n"


@pytest.fixture
def gone():
    child = subprocess.Popen(["true"])
    child.wait(PATIENCE)
    return child.pid


def test_a_gone_process_has_nothing_and_is_no_error(gone):
    assert process.command_line(gone) == ""
    assert process.state(gone) is None
    assert not process.is_alive(gone)
    assert process.children(gone) == []
    assert list(process.descendants(gone)) == []
    assert process.kill(gone) is False


def test_a_command_line_is_its_arguments(start):
    child = start(TREE, 0)
    read_pids(child, 1)

    assert process.command_line(child.pid) == f"{sys.executable} -c {TREE} 0 "


def test_a_variable_marks_processes_by_its_whole_value(start):
    child = start(TREE, 1, env=os.environ | {"MSRUN_TEST_COOKIE": "abc"})
    pids = read_pids(child, 2)

    assert sorted(process.with_variable(b"MSRUN_TEST_COOKIE=abc")) == sorted(pids)
    assert process.with_variable(b"MSRUN_TEST_COOKIE=ab") == []
    assert process.with_variable(b"SRUN_TEST_COOKIE=abc") == []
    child.stdin.close()
    child.wait(PATIENCE)


# A child that dies with its parent, or whose parent was gone before it said so.
PARENT = """
import os, sys
from msrun.supervise import process
parent = os.getpid()
pid = os.fork()
if pid == 0:
    process.die_with_parent(parent + int(sys.argv[1]))
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_child_dies_with_its_parent(start):
    parent = start(PARENT, 0)
    (child,) = read_pids(parent, 1)
    parent.kill()

    assert ended(child)


def test_a_child_whose_parent_is_another_already_dies_at_once(start):
    parent = start(PARENT, 1)

    assert read_pids(parent, 1) == [1]


def test_orphans_come_to_the_subreaper(start):
    code = """
import os, sys
from msrun.supervise import process
process.become_subreaper()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        sys.stdin.read()
    os._exit(0)
os.wait()
print(*process.children(os.getpid()), flush=True)
sys.stdin.read()
"""
    reaper = start(code)
    (orphan,) = read_pids(reaper, 1)

    assert process.children(reaper.pid) == [orphan]
    reaper.stdin.close()
    assert ended(orphan)


def test_a_signal_is_sent_and_that_is_said(start):
    child = start(TREE, 0)
    read_pids(child, 1)

    assert process.kill(child.pid, signal.SIGTERM) is True
    assert child.wait(PATIENCE) == -signal.SIGTERM


def test_what_c_code_has_buffered_is_written():
    code = """
import ctypes, os
from msrun.supervise import process
ctypes.CDLL(None).printf(b"from C\\n")
process.flush_c_streams()
os._exit(0)
"""
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=PATIENCE)

    assert out == "from C\n"
