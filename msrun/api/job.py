"""`msrun.launch` and `msrun.Job`: a job that a program or a notebook starts, waits for and stops.

The job is an ordinary one of the command line: a launcher in a process and session of its own,
which `keeper` ties to this process.  Here are its options, its function on the way there, and its
values and verdict on the way back.  One thread a job reads what comes from it, so every method may
be called from any thread, and the caller's signal handlers are its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast, overload

import msgspec

from msrun import environ
from msrun import errors as error_classes
from msrun.api.function import find_main
from msrun.api.options import OptionValue, PythonOptions
from msrun.api.process import JobProcess
from msrun.api.reports import LaunchEnded, LaunchOrder, LaunchRefused
from msrun.cluster.verdict import Verdict
from msrun.errors import JobFailed, MsrunError, UnreachableError, UsageError
from msrun.worker import pickled
from msrun.worker.call_files import BYTES_MAX, CallFiles

T = TypeVar("T")
Program = str | os.PathLike[str] | Callable[..., T]

_LINES_MAX = 1000
_ENDING_SECONDS = 1.0


def launch(
    function: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    workers: int | str | None = None,
    **options: OptionValue,
) -> list[T]:
    """Call `function` in every worker of a new job, and return their values in the order of ranks.

    It may be called in a script, a notebook, a thread.  An interrupt ends the job and is raised
    again.  Each worker has the environment of `msrun run`, such as RANK and WORLD_SIZE.  A restart
    calls the function again.  Of several nodes, each calls `launch`, and gets the values of its own
    ranks.

    Args:
        function: A function of the script or of a module; with cloudpickle installed, any.
        args: Its arguments.
        kwargs: Its arguments by name.
        workers: Workers of this node, as `workers_per_node`.
        options: Options of `msrun run` by their names, such as `max_restarts=3`.

    Raises:
        JobFailed: A worker failed, or the job was stopped.
        UsageError: The job cannot be started, or a value cannot be sent back.
    """
    if not callable(function):
        raise UsageError(
            f"msrun.launch calls a function, and {function!r} is none",
            hint=f"msrun.Job({function!r}) runs a script",
        )
    job = Job(function, args, kwargs, workers=workers, **options)
    job.start()
    try:
        return job.wait()
    finally:
        job.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where a job stands.

    Args:
        phase: `starting`, then `forming`, `running` or `stopping`, at last `done` or `failed`.
        generation: The generation that runs or is next; -1 before the first.
        nodes: Nodes that are registered.
        world_size: Workers in the generation.
        restarts: Restarts that were used.
    """

    phase: str
    generation: int = -1
    nodes: int = 0
    world_size: int = 0
    restarts: int = 0


class Job(Generic[T]):
    """A job that this program starts, waits for and stops; it ends with the program at the latest.

    As a context manager, it starts on entry and is stopped on exit.

    Args:
        program: Path of a script, or a function as of `launch`.
        args: Arguments of the script or function.
        kwargs: Arguments of a function by name.
        workers: Workers of this node, as `workers_per_node`.
        options: Options of `msrun run` by their names.

    Raises:
        UsageError: There is no such option, or it does not take its value.
    """

    @overload
    def __init__(
        self: Job[None],
        program: str | os.PathLike[str],
        args: Sequence[object] = (),
        kwargs: None = None,
        *,
        workers: int | str | None = None,
        **options: OptionValue,
    ) -> None: ...

    @overload
    def __init__(
        self,
        program: Callable[..., T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        workers: int | str | None = None,
        **options: OptionValue,
    ) -> None: ...

    def __init__(
        self,
        program: Any,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        workers: int | str | None = None,
        **options: OptionValue,
    ) -> None:
        if isinstance(args, str) or not isinstance(args, Sequence):
            raise UsageError(
                f"args={args!r} is no tuple or list of arguments",
                hint="arguments by name are kwargs"
                if isinstance(args, Mapping)
                else f"write [{args!r}]",
            )
        self._program = program
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._function = "" if isinstance(program, str | os.PathLike) else _checked(program)
        if self._kwargs and not self._function:
            raise UsageError("kwargs are for functions; a script has args")
        given = {"workers": workers, **options}
        self._options = PythonOptions(given, has_function=bool(self._function))
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process: JobProcess | None = None
        self._values: dict[int, bytes] = {}
        self._problems: list[str] = []
        self._traceback = ""
        self._loaded: list[T] | None = None

    def start(self) -> Self:
        """Start the job and return once its launcher has taken it; the workers may not run yet.

        Raises:
            UsageError: It cannot be started, or has been before.
        """
        if environ.call_directory():
            raise UsageError(
                "a worker that imports the script came to msrun.launch or msrun.Job again",
                hint='put the call below if __name__ == "__main__":',
            )
        with self._lock:
            if self._process is not None:
                raise UsageError("the job has been started before", hint="make another msrun.Job")
            self._process = JobProcess(self._write, self._collect)
        self._process.wait_for_begin()
        if self._process.refusal:
            raise self._refused(self._process.refusal)
        return self

    def wait(self, timeout: float | None = None) -> list[T]:
        """Wait for the end of the job and return the values of this node's ranks in their order.

        A rank that left by `sys.exit(0)` has the value None; a script has no values.  An interrupt
        stops the job; a second one does not wait for the workers' own end.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Raises:
            JobFailed: A worker failed, or the job was stopped.
            UsageError: It could not be started, or a value cannot be sent back.
            TimeoutError: It has not ended; it goes on.
        """
        job = self._started()
        if not job.wait(timeout):
            raise TimeoutError(f"job {self.job_id} has not ended within {timeout:g}s")
        if job.refusal:
            raise self._refused(job.refusal)
        if job.result is None or job.result.code:
            raise self._failed(job)
        return self._load_values()

    def stop(self, *, now: bool = False) -> None:
        """Stop the job and wait until nothing of it runs; of one that has ended, do nothing.

        Args:
            now: SIGKILL at once, without the grace in which workers may end by themselves.
        """
        if self._process is not None and self._owner == os.getpid():
            self._process.stop(now=now)

    def status(self) -> JobStatus:
        """Return where the job stands.

        Raises:
            UnreachableError: It does not answer.
        """
        job = self._started()
        while not job.has_ended:
            try:
                return _ask_status(job)
            except UnreachableError:
                # It may just be ending.
                if not job.wait(_ENDING_SECONDS):
                    raise
        verdict = self.verdict
        return JobStatus(
            phase="failed" if job.result is None or job.result.code else "done",
            generation=verdict.generation if verdict else -1,
            restarts=verdict.restarts if verdict else 0,
        )

    def logs(self, rank: int = 0, lines: int = 200) -> str:
        """Return the last lines that a rank has written, of all generations.

        Args:
            rank: The rank.
            lines: How many lines, at most 1000.

        Raises:
            UsageError: There is no such rank, or its log is on another node.
        """
        from msrun.supervise.logs import last_lines

        job = self._started()
        count = max(0, min(lines, _LINES_MAX))
        path = job.began.log_files.get(rank)
        if path is None:
            return _ask_log(job, rank, count)
        return "".join(f"{line}\n" for line in last_lines(path, count)) if count else ""

    @property
    def job_id(self) -> str:
        """Name of the job; empty before it starts, and where a backend starts the nodes."""
        return self._process.began.job_id if self._process else ""

    @property
    def log_dir(self) -> Path | None:
        """Directory of the logs on this node; None as long as there is none."""
        name = self._process.began.log_dir if self._process else ""
        return Path(name) if name else None

    @property
    def verdict(self) -> Verdict | None:
        """The result, also of a success; None before the end, or where there is none."""
        result = self._process.result if self._process else None
        return result.verdict if result else None

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        what = self._function or os.fspath(self._program)
        state = "not started"
        if self._process:
            state = "ended" if self._process.has_ended else "running"
        return f"<msrun.Job {self.job_id or what} ({state})>"

    # To the workers and back.

    def _write(self, files: CallFiles) -> dict[str, str]:
        """Leave the order, and the function, in the job's directory; return the environment."""
        env = environ.current()
        words = self._options.words
        if self._function:
            main = find_main(self._function)
            call = pickled.dump_call(
                self._program, self._args, self._kwargs, main_file=main.main_path
            )
            if len(call.data) > BYTES_MAX:
                raise UsageError(
                    f"the arguments of {self._function} are larger than {BYTES_MAX >> 30} GiB",
                    hint="let the function read them from files",
                )
            if not call.needs_main:
                main = msgspec.structs.replace(main, main_path="", main_module="")
            files.write_call(main, call.data)
            env[environ.CALL] = str(files.directory)
            words = [*words, "--module", "msrun.worker.call"]
        else:
            script = os.fspath(self._program)
            script = f"./{script}" if script.startswith("-") else script
            words = [*words, script, *map(str, self._args)]
        order = LaunchOrder(words=words, function=self._function)
        files.write_order(msgspec.json.encode(order))
        return env

    def _collect(self, files: CallFiles, result: LaunchEnded) -> None:
        """Take the values, or the text of the exception, out of the job's directory."""
        verdict = result.verdict
        if not self._function or verdict is None:
            return
        if verdict.code:
            if verdict.root:
                rank = verdict.root.rank
                self._traceback = files.read_traceback(verdict.generation, rank)
            return
        for rank in files.ranks(verdict.generation):
            value = files.read_value(verdict.generation, rank)
            if value is not None:
                self._values[rank] = value
            else:
                self._problems.append(files.read_problem(verdict.generation, rank))

    def _load_values(self) -> list[T]:
        with self._lock:
            if self._loaded is not None:
                return self._loaded
            if not self._function:
                self._loaded = []
                return self._loaded
            if self._problems:
                hint = "return numbers, text, arrays or CPU tensors, or write the rest to a file"
                raise UsageError(self._problems[0], hint=hint)
            loaded: list[object] = []
            known = self._process.began.log_files if self._process else {}
            for rank in sorted(known or self._values):
                data = self._values.get(rank)
                try:
                    loaded.append(None if data is None else pickled.load_value(data))
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    raise UsageError(
                        f"the value of rank {rank} cannot be loaded: {why}",
                        hint="its class must be one that this process can import",
                    ) from error
            self._loaded, self._values = cast("list[T]", loaded), {}
            return self._loaded

    # Errors.

    def _started(self) -> JobProcess:
        if self._process is None:
            raise UsageError("the job has not been started", hint="call start()")
        if self._owner != os.getpid():
            raise UsageError(f"the job is of process {self._owner}, which this one was forked from")
        return self._process

    def _refused(self, refusal: LaunchRefused) -> MsrunError:
        kind = getattr(error_classes, refusal.kind, MsrunError)
        hint = refusal.hint and self._options.in_python(refusal.hint)
        return cast("MsrunError", kind(self._options.in_python(refusal.message), hint=hint))

    def _failed(self, job: JobProcess) -> JobFailed:
        """Return the error that says how the job failed."""
        verdict = self.verdict
        if verdict is None:
            code = job.result.code if job.result else job.code
            return JobFailed(f"job {self.job_id or self!r} ended with code {code}", code=code)
        root = verdict.root
        if root is None:
            return JobFailed(verdict.reason, code=verdict.code, hint=verdict.hint or None)
        return JobFailed(
            f"{verdict.reason}: {root.error}" if root.error else verdict.reason,
            code=verdict.code,
            rank=root.rank,
            node=root.host,
            log_file=root.log_file,
            error=root.error,
            traceback=self._traceback,
            hint=verdict.hint or None,
        )


def _ask_status(job: JobProcess) -> JobStatus:
    from msrun.cluster.wire.control_messages import GetStatus, Status

    with job.connected() as client:
        if client is None:
            return JobStatus(phase="starting")
        status = client.ask(GetStatus(), Status)
    return JobStatus(
        phase=status.phase,
        generation=status.generation,
        nodes=status.nodes,
        world_size=status.world_size,
        restarts=status.failures + status.losses,
    )


def _ask_log(job: JobProcess, rank: int, lines: int) -> str:
    from msrun.cluster.wire.control_messages import GetLog, Log

    if job.has_ended or job.began.log_files:
        known = sorted(job.began.log_files)
        where = f"this node has ranks {known}" if known else f"look into {job.began.log_dir}"
        raise UsageError(f"the log of rank {rank} is not known here ({where})")
    with job.connected() as client:
        if client is None:
            raise UsageError("the job has not formed, so its ranks have no logs")
        log: Log = client.ask(GetLog(rank=rank, lines=lines), Log)
    return log.data.decode(errors="replace")


def _checked(program: object) -> str:
    """Return the name of a function that workers are to call."""
    if not callable(program):
        kind = type(program).__name__
        raise UsageError(f"{program!r} is a {kind}, neither a function nor the path of a script")
    return pickled.name_of(program)
