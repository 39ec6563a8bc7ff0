"""Linux calls about this process and its descendants that Python's library lacks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

from msrun.errors import signal_name

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Ten times the share of an ordinary process, and never all of a CPU.
_NICE = -10
_LISTS_MAX = 10
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `signum` when `parent`'s forking thread ends.

    Exits at once when `parent` is gone already, which the kernel would not notice.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Have orphaned descendants of this process become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_standard_streams() -> None:
    """Give descriptors 0, 1 and 2 to /dev/null where they are closed.

    Otherwise the next file or socket would get their numbers, and with them all that is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - stderr
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional only
    os.close(descriptor)


@contextlib.contextmanager
def signals_held(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Hold `signals` back, also from what is started meanwhile, which begins with them blocked.

    So a process of ours that is to ignore a signal does not die of it before it can say so.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_priority(*, before_all: bool = False) -> None:
    """Give this process more of a busy CPU, where the user may have that: as root.

    Busy workers then hardly delay its work, or its end.  Its children get the ordinary priority.
    A thread without a name of its own is still being set up, and libzmq's threads look at their
    scheduling while they are; such a thread is left to the next call.

    Args:
        before_all: Real-time priority.  Not while children are reaped: see `patiently`.
    """
    policy = (os.SCHED_RR if before_all else os.SCHED_OTHER) | os.SCHED_RESET_ON_FORK
    param = os.sched_param(int(before_all))
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            is_main = thread.name == str(os.getpid())
            if is_main or _thread_name(thread) != _thread_name(Path("/proc/self")):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICE)
                os.sched_setscheduler(int(thread.name), policy, param)
    if os.getsid(0) == os.getpid():
        # Where the kernel shares CPUs out by session, workers have some of their own.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE))


@contextlib.contextmanager
def patiently() -> Iterator[None]:
    """Reap children inside, without real-time priority.

    To reap a process while another one reads its /proc entry, the kernel spins until the reader has
    gone on.  A reaper with real-time priority would keep that reader from the CPU for a second.
    """
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    if not param.sched_priority:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


def _thread_name(directory: Path) -> str:
    return Path(directory, "comm").read_text()


def render_status(status: int) -> str:
    """Return how a process ended, from its `waitpid` status, in words that follow its name."""
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def flush_c_streams() -> None:
    """Flush the output streams of C code."""
    _libc.fflush(None)


def descendants(root: int) -> Iterator[int]:
    """Yield the pids of all living descendants of `root`, parents first.

    The children of each are listed before it is yielded, so it may be killed at once.
    Processes that fork or die during the call may be missed.
    """
    pending = children(root)
    while pending:
        pid = pending.pop()
        pending += children(pid)
        if is_alive(pid):
            yield pid


def is_alive(pid: int) -> bool:
    """Return whether `pid` exists and is no zombie."""
    return _stat_field(pid, 0) not in (None, "Z", "X")


def state(pid: int) -> str | None:
    """Return the kernel's letter for the state of `pid`, such as `D`; None when it is gone."""
    return _stat_field(pid, 0)


def name(pid: int) -> str:
    """Return the name of `pid` that `top` shows; empty when it is gone."""
    try:
        return _thread_name(Path(f"/proc/{pid}")).rstrip("\n")
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time that `pid` has used, all its threads together; None when it is gone."""
    user, system = _stat_field(pid, 11), _stat_field(pid, 12)
    if user is None or system is None:
        return None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main_thread_wakes(pid: int) -> int:
    """Return how often the main thread of `pid` was woken after it had waited."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    found = (line for line in text.splitlines() if line.startswith("voluntary_ctxt_switches:"))
    return int(next(found, "0").split()[-1])


def sleeps(pid: int) -> bool:
    """Return whether the main thread of `pid` sleeps for a time, as far as the kernel tells."""
    try:
        return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text(errors="replace")
    except OSError:
        return False


def tree_cpu_seconds(pid: int) -> float:
    """Return the CPU time of `pid` and of all its children, those that have ended included."""
    ticks = 0
    for one in _tree(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{one}/stat").read_text(errors="replace")
            ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return float(ticks) / os.sysconf("SC_CLK_TCK")


def tree_bytes(pid: int) -> int:
    """Return the bytes that `pid` and its children have read and written, in files and pipes."""
    count = 0
    for one in _tree(pid):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{one}/io").read_text(errors="replace").splitlines()
            count += sum(int(line[7:]) for line in lines if line.startswith(("rchar: ", "wchar: ")))
    return count


def _tree(pid: int) -> set[int]:
    """Return `pid` and all its descendants."""
    pending, seen = [pid], set()
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            pending += children(one)
    return seen


def catches(pid: int, signum: int) -> bool:
    """Return whether `pid` has a handler for `signum`."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    masks = (line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:"))
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def _stat_field(pid: int, index: int) -> str | None:
    """Return a field of /proc/PID/stat, counted after the command name."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[index]


@functools.cache
def _kernel_lists_children() -> bool:
    """Return whether the kernel was built with /proc/PID/task/TID/children."""
    pid = os.getpid()
    return Path(f"/proc/{pid}/task/{pid}/children").exists()


def children(pid: int) -> list[int]:
    """Return the children of `pid`, of all its threads."""
    return _listed_children(pid) if _kernel_lists_children() else _found_children(pid)


def _found_children(pid: int) -> list[int]:
    return [p for p in pids() if _stat_field(p, 1) == str(pid)]


def _listed_children(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - runs often, Path is slow
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                pids.extend(map(int, text.split()))
    return pids


def reap_adopted(own: Container[int]) -> None:
    """Reap the children of this process that have ended, except `own`, which others wait for."""
    for pid in children(os.getpid()):
        if pid not in own and state(pid) == "Z":
            os.waitpid(pid, 0)


def pids() -> Iterator[int]:
    """Yield the pids of all processes of the machine."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - runs often, Path is slow
        if name.isdigit():
            yield int(name)


def command_line(pid: int) -> str:
    """Return the arguments of `pid`, space separated; empty when it is gone."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return arguments.replace(b"\0", b" ").decode(errors="replace")


def kill(pid: int, signum: int = signal.SIGKILL) -> bool:
    """Send `signum` to `pid` if it still exists; return whether it was sent."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_and_wait(pids: Iterable[int], timeout: float) -> None:
    """SIGKILL `pids` and wait for their ends, until none has ended for `timeout` seconds."""
    with contextlib.ExitStack() as stack:
        poller, waiting = select.poll(), 0
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended by itself
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                poller.register(descriptor, select.POLLIN)
                waiting += 1
        while waiting and (ended := poller.poll(timeout * 1000)):
            for descriptor, _ in ended:
                poller.unregister(descriptor)
            waiting -= len(ended)


def kill_all(listed: Callable[[], Iterable[int]], timeout: float) -> set[int]:
    """SIGKILL the processes that `listed` returns until it returns no others; return who stays.

    One list is not enough: what they fork while it is made is not in it, and neither is a process
    in the midst of an exec, which shows no environment for that moment.

    Args:
        listed: Returns pids.
        timeout: Seconds without an end after which those that are left are given up.
    """
    stuck: set[int] = set()
    for _ in range(_LISTS_MAX):
        fresh = set(listed()) - stuck
        if not fresh:
            break
        kill_and_wait(fresh, timeout)
        stuck = {pid for pid in stuck | fresh if is_alive(pid)}
    return stuck


def describe(pid: int) -> str:
    """Return `pid`, its state and its command, for people."""
    return f"{pid} {state(pid)} {command_line(pid)}".rstrip()


def with_variable(assignment: bytes) -> list[int]:
    """Return the pids of this user's processes that were started with `NAME=value`.

    The cookie by which strays are found, never their names.
    """
    matching = []
    for pid in pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if assignment in environment.split(b"\0"):
            matching.append(pid)
    return matching
