"""What the kernel says about the work of a process."""

import os
import subprocess
import sys

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
