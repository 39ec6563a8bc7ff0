"""The process between a program and the launcher of its job, and that launcher.

A launcher installs signal handlers, takes its process's priority and output, and dies with its
terminal: none of that may happen to a notebook.  And the notebook's process has threads, so it must
not be forked.  So a fresh interpreter in a session of its own becomes the *keeper*.  It forks the
launcher while it has one thread and no module of ours but a few, passes signals on, and waits for
the end of either side: when the program is gone, however it died, the launcher gets SIGTERM, and
when the keeper is gone, too.

No parent-death signal ties the keeper to the program: the kernel would send it when the *thread*
that started the job ends.  It watches a pidfd instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from msrun import entry
from msrun.supervise import process, title

if TYPE_CHECKING:
    from msrun.api.reports import AnyReport
    from msrun.cli.job.prepare import JobRequest
    from msrun.cli.system import System

GO = b"g"
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(arguments: list[str]) -> Callable[[], object] | None:
    """Keep a launcher: `SOCKET PIDFD DIRECTORY`; the caller's pidfd, and the job's directory."""
    sock, caller = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    directory = arguments[2]
    # A program may have started us from a thread that blocks signals, or ignore some.
    signal.pthread_sigmask(signal.SIG_SETMASK, _PASSED_ON)
    for signum in (*_PASSED_ON, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in (sock.fileno(), caller):
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only
    if not _is_wanted(sock, caller):
        return None
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(caller)
        return partial(_launch, sock, directory, keeper)
    sock.close()
    return partial(_keep, pid, caller, directory)


def _is_wanted(sock: socket.socket, caller: int) -> bool:
    """Wait until the program knows this process, which an interrupt may have kept it from."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.register(caller, select.POLLIN)
    poller.poll()
    with contextlib.suppress(OSError):
        return sock.recv(1, socket.MSG_DONTWAIT) == GO
    return False


def _keep(pid: int, caller: int, directory: str) -> NoReturn:
    """Wait for the end of the launcher `pid`, which follows when the program ends."""
    title.set_name(title.KEEPER)  # by which the launcher knows it, should somebody stop it
    for signum in _PASSED_ON:
        signal.signal(signum, lambda signum, _: process.kill(pid, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    launcher = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(launcher, select.POLLIN)
    poller.register(caller, select.POLLIN)
    is_left = False
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if launcher in ready:
            break
        if caller in ready:
            is_left = True
            poller.unregister(caller)
            process.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if is_left:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(code if code >= 0 else 128 - code)


def _launch(sock: socket.socket, directory: str, keeper: int) -> NoReturn:
    """Be the launcher of the job in `directory`."""
    process.die_with_parent(keeper, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    sys.path.insert(0, str(Path(entry.__file__).parent.parent))
    import msgspec

    from msrun.api import reports
    from msrun.cli.main import guarded
    from msrun.cli.system import RealSystem
    from msrun.worker.call_files import CallFiles

    def tell(report: AnyReport) -> None:
        with contextlib.suppress(OSError):  # the program is gone, and we will be told
            sock.sendall(reports.encode(report))

    content = CallFiles(Path(directory)).read_order()
    order = msgspec.json.decode(content, type=reports.LaunchOrder)
    sys.exit(guarded(partial(_run, tell, order.function), order.words, RealSystem()))


def _run(
    tell: Callable[[AnyReport], None], function: str, words: Sequence[str], system: System
) -> int:
    """Run the job as `msrun run` does, and tell the program how it stands."""
    from msrun.api.reports import LaunchBegan, LaunchEnded, LaunchRefused
    from msrun.cli.job.prepare import prepare, read_request
    from msrun.cli.options.command_line import read_command_line
    from msrun.cli.options.table import TABLE
    from msrun.cli.output import say_notes
    from msrun.cli.verbs.run import SUMMARY
    from msrun.errors import MsrunError, UsageError
    from msrun.processes import ending

    try:
        line = read_command_line("msrun", SUMMARY, TABLE, words)
        request = read_request(line, TABLE, system)
        if request.is_fleet:
            if function:
                raise UsageError(
                    f"{function} cannot be called on nodes that a backend starts",
                    hint="give msrun.Job a script, which they can read",
                )
            from msrun.cli.job.fleet import run_fleet

            tell(LaunchBegan(pid=os.getpid()))
            tell(LaunchEnded(code=(code := run_fleet(request, system))))
            return code
        prepared = prepare(_named(request, function, system) if function else request, system)
        plan = prepared.plan
        logs = {worker.rank: worker.log_file for worker in plan.workers if plan.has_ranks}
        job_id, log_dir = plan.job.job_id, plan.job.log_dir
        tell(LaunchBegan(pid=os.getpid(), job_id=job_id, log_dir=log_dir, log_files=logs))
        say_notes(prepared.notes)
        code = prepared.launcher.submit(plan)
    except MsrunError as error:
        kind = type(error).__name__
        tell(LaunchRefused(kind=kind, message=error.message, hint=error.hint))
        return error.exit_code
    verdict = ending.read(log_dir, job_id)
    # One of an earlier job of this name, if ours could not be written.
    tell(LaunchEnded(code=code, verdict=verdict if verdict and verdict.code == code else None))
    return code


def _named(request: JobRequest, function: str, system: System) -> JobRequest:
    """Return `request` with a job id after its function, where several nodes need not agree."""
    from dataclasses import replace

    from msrun.cli.job.program import job_id_stem
    from msrun.cli.options import catalog as options
    from msrun.cli.options.settings import Given
    from msrun.job import ProgramKind, WorkerProgram

    settings = request.settings
    shared = (options.NNODES, options.WORKER_NUM, options.MASTER_ADDR, options.RDZV_ENDPOINT)
    if any(map(settings.get, (options.JOB_ID, options.RDZV_ID, *shared))):
        return request
    stem = job_id_stem(WorkerProgram(kind=ProgramKind.COMMAND, target=function))
    named = settings.with_values({options.JOB_ID: (Given(f"{stem}-{system.token()}"),)})
    return replace(request, settings=named)
