"""Runs a program under `python` and under `main_module`, so that a test can compare."""

import os
import re
import subprocess
import sys
import textwrap

from msrun import entry

OURS = (sys.executable, entry.__file__, "msrun.worker.bootstrap:main")


def start(command, cwd):
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")},
    )


def end(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out, re.sub(r"\b0x[0-9a-f]+", "0x...", err)


def run_both(cwd, *arguments):
    """Return what `python` and what we make of `python ARGUMENTS`."""
    kind, *rest = ("module", *arguments[1:]) if arguments[0] == "-m" else ("script", *arguments)
    plain = start([sys.executable, *arguments], cwd)
    ours = start([*OURS, kind, *rest], cwd)
    return end(plain), end(ours)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
