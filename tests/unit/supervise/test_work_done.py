"""What the kernel says about the work of a process."""

import os
import subprocess
import sys
import time
from pathlib import Path

from msrun.supervise import process


def test_the_work_of_children_counts():
    """Of a parent that only waits, once the child has ended."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])"
    code += "; print(1, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        alone = process.cpu_seconds(child.pid)
        tree = process.tree_cpu_seconds(child.pid)
        wakes = process.main_thread_wakes(child.pid)
        whole = process.tree_cpu_seconds(os.getpid())
    finally:
        child.communicate(b"\n", timeout=20)

    assert alone + 0.05 < tree <= whole
    assert wakes >= 1
    assert process.main_thread_wakes(child.pid) == 0
    assert process.tree_cpu_seconds(child.pid) == 0


def child_of(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_what_children_read_and_write_counts():
    copy = "head -c 9000000 /dev/zero | cat >/dev/null"
    code = f"import subprocess; subprocess.run({copy!r}, shell=True)"
    child = child_of(f"{code}; print(1, flush=True); input()")
    try:
        child.stdout.readline()
        moved = process.tree_bytes(child.pid)
    finally:
        child.communicate(b"\n", timeout=20)

    assert moved >= 9_000_000
    assert process.tree_bytes(child.pid) == 0


def test_who_sleeps_for_a_time_is_told_from_who_waits():
    sleeper, waiter = (
        child_of("import time; print(flush=True); time.sleep(60)"),
        child_of("input()"),
    )
    try:
        sleeper.stdout.readline()
        deadline = time.monotonic() + 20
        while not process.sleeps(sleeper.pid) and time.monotonic() < deadline:
            pass
        found = process.sleeps(sleeper.pid), process.sleeps(waiter.pid)
        kernel_tells = Path(f"/proc/{sleeper.pid}/wchan").read_text() not in ("", "0")
    finally:
        sleeper.kill()
        sleeper.communicate(timeout=20)
        waiter.communicate(b"\n", timeout=20)

    assert found == (kernel_tells, False)
    assert not process.sleeps(sleeper.pid)
