"""A program that writes down what it can see of itself, into `$PROBE_DIR/RANK.json`."""

import builtins
import contextlib
import gc
import io
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

NAMES = dict(globals())
number: int = 1
OF_THE_TESTS = ("PROBE_DIR", "PYTEST_CURRENT_TEST")


def main_module():
    facts = {name: repr(value) for name, value in NAMES.items() if name.startswith("__")}
    facts["__loader__"] = [type(__loader__).__name__, __loader__.name, __loader__.path]
    facts["__builtins__"] = NAMES["__builtins__"] is builtins
    facts["annotations"] = repr(__annotations__)
    facts["names"] = list(NAMES)
    facts["is the main module"] = sys.modules["__main__"].__dict__ is globals()
    facts["aliases"] = [name for name, m in sys.modules.items() if m is sys.modules["__main__"]]
    facts["name"] = repr(sys.modules["__main__"])
    return facts


def command():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "shown by ps": Path("/proc/self/cmdline").read_text().split("\0"),
        "name": Path("/proc/self/comm").read_text(),
        "path": sys.path,
        "flags": repr(sys.flags),
        "executable": sys.executable,
        "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix],
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "bytecode": [sys.dont_write_bytecode, sys.pycache_prefix],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()],
        "tracing": [sys.gettrace() is None, sys.getprofile() is None],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            sys.breakpointhook is sys.__breakpointhook__,
            threading.excepthook is threading.__excepthook__,
        ],
        "finders": [
            getattr(finder, "__name__", type(finder).__name__)
            for finder in sys.meta_path
            if not type(finder).__module__.startswith("msrun.")
        ],
        "cwd": str(Path.cwd()),
        "environ": {k: v for k, v in os.environ.items() if k not in OF_THE_TESTS},
        "temporary": tempfile.gettempdir(),
        "hash": hash("x") if "PYTHONHASHSEED" in os.environ else None,
    }


def streams():
    return {
        name: {
            "name": stream.name,
            "mode": stream.mode,
            "encoding": stream.encoding,
            "errors": stream.errors,
            "newlines": repr(stream.newlines),
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
            "isatty": stream.isatty(),
            "fileno": stream.fileno(),
            "can": [stream.readable(), stream.writable(), stream.seekable()],
            "type": type(stream).__name__,
            "raw is a file": isinstance(stream.buffer, io.FileIO),
            "is original": stream is getattr(sys, f"__{name}__"),
        }
        for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout), ("stderr", sys.stderr))
    }


def status(*names):
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: found[name].strip() for name in names}


# Where a dump goes that the agent asks for; no program that is started inherits it.
STACK_DESCRIPTOR = 100


def descriptors():
    found = {}
    for fd in set(range(256)) - {STACK_DESCRIPTOR}:
        with contextlib.suppress(OSError):
            target = str(Path(f"/proc/self/fd/{fd}").readlink())
            found[fd] = [
                target if fd == 0 else "a log" if fd <= 2 else target,
                os.get_inheritable(fd),
            ]
    return found


def process():
    umask = os.umask(0)
    os.umask(umask)
    named = [signum for signum in signal.valid_signals() if isinstance(signum, signal.Signals)]
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "handlers": {signum.name: repr(signal.getsignal(signum)) for signum in named},
        "signals": status("SigBlk", "SigIgn", "SigPnd", "ShdPnd"),
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "wakeup": signal.set_wakeup_fd(-1),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "descriptors": descriptors(),
        "umask": umask,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()],
        "rights": status("NoNewPrivs", "Seccomp", "CapEff"),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "oom": Path("/proc/self/oom_score_adj").read_text(),
    }


def runtime():
    me = threading.current_thread()
    root = logging.getLogger()
    process = multiprocessing.current_process()
    return {
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "main thread": [me.name, me.daemon, me is threading.main_thread()],
        "thread ids": [me.ident == threading.get_ident(), me.native_id == os.getpid()],
        "threads": [threading.active_count(), status("Threads")],
        "locale": [locale.setlocale(locale.LC_ALL), locale.getencoding()],
        "zone": [time.tzname, time.timezone],
        "process": [process.name, type(process).__name__, process.daemon, len(process.authkey)],
        "process id": process.pid == os.getpid(),
        "parent process": repr(multiprocessing.parent_process()),
        "children": multiprocessing.active_children(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "logging": [root.level, [repr(handler) for handler in root.handlers], root.manager.disable],
    }


def handlers():
    """Return what each logger that torch made writes to."""
    loggers = logging.root.manager.loggerDict.items()
    return {
        name: [
            [type(h).__name__, getattr(h, "stream", None) is sys.stderr] for h in logger.handlers
        ]
        for name, logger in loggers
        if getattr(logger, "handlers", None)
    }


def chance():
    import numpy as np
    import torch

    return {
        "random": random.random(),
        "numpy": np.random.rand(),  # noqa: NPY002 - what old programs call
        "generator": np.random.default_rng().random(),
        "torch": torch.rand(()).item(),
        "torch seed": torch.initial_seed(),
        "key": multiprocessing.current_process().authkey.hex(),
        "set order": None if "PYTHONHASHSEED" in os.environ else hash("x"),
    }


def with_torch():
    import numpy as np
    import torch
    import torch.distributed

    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - what old programs call
    torch.manual_seed(5)
    square = torch.ones(400, 400)
    drawn = np.random.rand(2).tolist()  # noqa: NPY002 - what old programs call
    facts = {
        "seeded": [random.random(), drawn, torch.randn(3).tolist()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "parallel": torch.__config__.parallel_info(),
        "product": [(square @ square).sum().item(), (np.ones((400, 400)) @ np.ones(400)).sum()],
        "dtype": repr(torch.get_default_dtype()),
        "modes": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
        "precision": torch.get_float32_matmul_precision(),
        "group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "filters": [[repr(part) for part in entry] for entry in warnings.filters],
        "loggers": handlers(),
    }
    return facts | {"process": process(), "runtime": runtime()}


def differs():
    """Return what is known to depend on how this process was started."""
    import faulthandler

    frames, frame = 0, sys._getframe()
    while frame := frame.f_back:
        frames += 1
    return {
        "finder": type(sys.meta_path[0]).__module__.startswith("msrun."),
        "frames": frames,
        "depth": depth(),
        "faulthandler": faulthandler.is_enabled(),
        "frozen": gc.get_freeze_count() > 0,
        "stack file": Path(f"/proc/self/fd/{STACK_DESCRIPTOR}").exists()
        and not os.get_inheritable(STACK_DESCRIPTOR),
        "modules": sorted(sys.modules),
    }


def depth(reached=0):
    try:
        return depth(reached + 1)
    except RecursionError:
        return reached


def main():
    document = {
        "main": main_module(),
        "command": command(),
        "streams": streams(),
        "process": process(),
    }
    beside = {"differs": differs(), "chance": chance()}
    document["runtime"] = runtime()
    document["torch"] = with_torch()
    target = Path(os.environ["PROBE_DIR"], f"{os.environ['RANK']}.json")
    target.write_text(json.dumps({"same": document, **beside}))


main()
