"""The steps from a bare fork to the program's first line.

`become_worker` runs in the child of the forkserver.  A Python program continues in
the same process when forking is safe; otherwise a fresh interpreter starts `main`,
and any other program is exec'ed as it is.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from msrun import entry, environ
from msrun.supervise import containment, logs, memory_policy, process, title
from msrun.supervise.forkserver import SpawnContext
from msrun.supervise.orders import SERVER, SpawnServer, SpawnWorker
from msrun.supervise.reaper import Next
from msrun.worker import (
    early_variables,
    gloo_peers,
    main_module,
    math_threads,
    mindspore,
    stacks,
    stdio,
)

# Every interpreter does so when it starts; of other programs, pipes rely on the contrary.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_ERROR_TEXT_MAX = 16 * 1024


def become_worker(context: SpawnContext, order: SpawnWorker, streams: Sequence[int]) -> Next:
    """Turn this fresh fork into the rank of `order`; return the call that runs its program.

    Args:
        context: The facts about the forkserver.
        order: The rank.
        streams: The open files that came with the order.
    """
    configure = context.configure
    try:
        _leave_forkserver(context)
        if configure.cgroup:
            containment.enter_generation(configure.cgroup, order.generation)
        _redirect(order, streams)
        if not order.keep_stdin:
            _close_stdin()
        _bind(order)
        environ.install(order.env)
        if order.asks_for_mindspore:
            mindspore.ask_store()
        if context.fork:
            math_threads.follow_environment(was=configure.threads)
            _reseed()
            _name_main_thread()
            _hear_signals(context)
            early_variables.watch()
            stdio.tell_apart(environ.rank_file(logs.SAMPLES))
            return partial(run_program, configure.kind, configure.argv)
        _hear_signals(context, is_exec=True)
        _exec(configure.kind, configure.argv, configure.interpreter_options)
    except OSError as error:
        os.write(2, f"msrun: cannot start rank {order.rank}: {error}\n".encode())
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def become_server(context: SpawnContext, order: SpawnServer) -> Next:
    """Turn this fresh fork into the parameter server of `order`."""
    configure = context.configure
    try:
        _leave_forkserver(context)
        if configure.cgroup:
            containment.enter_servers(configure.cgroup)
        stdio.redirect(order.log_file, append=bool(order.banner), banner=order.banner)
        _close_stdin()
        environ.install(order.env)
        if context.fork:
            math_threads.follow_environment(was=configure.threads)
            _reseed()
            _name_main_thread()
            _hear_signals(context)
            return _run_server
        _hear_signals(context, is_exec=True)
        python = [sys.executable, str(Path(entry.__file__)), f"{__name__}:run_server"]
        os.execv(sys.executable, python)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(2, f"msrun: cannot start server {order.server}: {error}\n".encode())
        os._exit(_NOT_EXECUTABLE)


def run_server(_arguments: list[str]) -> NoReturn:
    """Be a parameter server, in an interpreter of its own, until it is ended."""
    stdio.install()
    _run_server()


def _run_server() -> NoReturn:
    title.set_name("msrun server")
    title.show_as(["msrun", "server", *environ.server_words()], environ.current())
    code = main_module.ERROR
    try:
        code = importlib.import_module(SERVER).main()
    except BaseException as error:  # noqa: BLE001 - the last one before the process's end
        record_error(error)
        traceback.print_exception(error)
    main_module.leave(code)


def main(arguments: list[str]) -> NoReturn:
    """Run a program in an interpreter of its own: `KIND TARGET ARGS`."""
    stdio.install()
    stdio.tell_apart(environ.rank_file(logs.SAMPLES))
    run_program(arguments[0], arguments[1:])


def run_program(kind: str, argv: list[str]) -> NoReturn:
    """Run a Python program as `__main__`; never returns."""
    module = ["-m"] if kind == "module" else []
    title.set_name(Path(sys.executable).name)
    title.show_as([sys.executable, *module, *argv], environ.current())
    stacks.show_on_signal()
    gloo_peers.install()
    main_module.run(kind, argv, record_error)


def _leave_forkserver(context: SpawnContext) -> None:
    """Drop everything that ties this process to the forkserver but its death."""
    wakeup = signal.set_wakeup_fd(-1)
    for descriptor in (context.wakeup, wakeup, *context.listen_fds):
        os.close(descriptor)
    os.setsid()
    process.die_with_parent(context.parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _redirect(order: SpawnWorker, streams: Sequence[int]) -> None:
    """Send stdout and stderr to their files, both to the log unless they have one each."""
    banner = logs.banner(order.generation) if order.append else ""
    if streams:
        stdio.redirect_to(streams, banner=banner)
        return
    stdio.redirect(order.log_file, append=order.append, banner=banner)
    if order.out_file:
        stdio.redirect(order.out_file, (1,), append=order.append, banner=banner)
    if order.err_file:
        stdio.redirect(order.err_file, (2,), append=order.append, banner=banner)


def _hear_signals(context: SpawnContext, *, is_exec: bool = False) -> None:
    """Restore the launcher's signal handlers, and let pending signals through.

    Only now: an earlier traceback of an interrupt would go to the launcher's stderr, not to the
    log.  A program that is exec'ed (`is_exec`) has no handlers, nor a traceback of this one.
    """
    for signum, handler in context.signals.items():
        kept = handler if handler is signal.SIG_IGN or not is_exec else signal.SIG_DFL
        signal.signal(signum, kept)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, context.signals)


def _close_stdin() -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)


def _bind(order: SpawnWorker) -> None:
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    if order.numa_nodes and (problem := memory_policy.bind_memory(tuple(order.numa_nodes))):
        os.write(2, f"[msrun] memory is not bound: {problem}\n".encode())


def _reseed() -> None:
    """Give this process random numbers of its own, as a fresh interpreter has.

    torch's generator takes its seed when it is first used, which its import does; those
    of devices begin with one constant in every fresh process.
    """
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if multiprocessing_process := sys.modules.get("multiprocessing.process"):
        multiprocessing_process.current_process().authkey = os.urandom(32)


def _name_main_thread() -> None:
    """Give the main thread this process's own id.

    Python forgets to after a fork, until 3.13.4: https://github.com/python/cpython/issues/132542
    """
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public setter


def _exec(kind: str, argv: list[str], interpreter_options: list[str]) -> NoReturn:
    if kind == "command":
        for signum in _IGNORED_BY_PYTHON:
            signal.signal(signum, signal.SIG_DFL)
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    python = [sys.executable, *interpreter_options]
    start = [str(Path(entry.__file__)), f"{__name__}:main", kind]
    os.execv(sys.executable, [*python, *start, *argv])  # noqa: S606


def record_error(error: BaseException, *, is_closer: bool = False) -> None:
    """Leave `error` where the agent looks for it, in torchelastic's format.

    Args:
        error: The exception.
        is_closer: Whether it is closer to the cause than what is there; else that is kept.
    """
    path = environ.error_file()
    if not path or (Path(path).exists() and not is_closer):
        return
    text = "".join(traceback.format_exception(error))
    message, first = _sentence(error), _first_cause(error)
    # A pipeline stage wraps an exception of the user's code into one of torch's.
    if first is not error:
        message = f"{message}, caused by {_sentence(first)}"
    extra = {
        "py_callstack": text[-_ERROR_TEXT_MAX:],
        "timestamp": str(int(time.time())),
        "monotonic": time.monotonic(),
    }
    content = {"message": {"message": message[:_ERROR_TEXT_MAX], "extraInfo": extra}}
    try:
        Path(path).write_text(json.dumps(content))
    except OSError:
        return


def _first_cause(error: BaseException) -> BaseException:
    """Return the exception from which all others up to `error` were raised."""
    seen = {id(error)}
    while error.__cause__ and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def _sentence(error: BaseException) -> str:
    """Return the name of `error` and the first line of its message that is not empty."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    # Before the message come a syntax error's indented lines, after it lines of advice.
    at = next((n for n, line in enumerate(lines) if line[:1].strip()), None)
    if at is None:
        return type(error).__name__
    if not lines[at].endswith(": "):
        return lines[at]
    rest = next((line.strip() for line in lines[at + 1 :] if line.strip()), "")
    return f"{lines[at]}{rest.rstrip(':')}"
