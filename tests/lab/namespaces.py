"""The two programs of a lab that call the kernel; run by `python -I -S`, read by `hosts.py`.

`namespaces.py keep FOLDER [SHOWN...]` holds the lab.  It has a network of its own, where the
switch is, and every host's first process is its child.  A line with a name on standard input
boots that host; the answer is the pid of its first process.  No namespace gets a name, so each
lives exactly as long as its processes: the end of input, which also comes when the tests are
killed, ends every host and then the keeper.

    FOLDER  holds `etc/NAME`, the /etc/hosts of each host, and `home` where all share one
    SHOWN   paths that the private directories of a host would hide, and must not

`namespaces.py enter PID DIRECTORY COMMAND...` runs a command on the host whose first process is
PID.  To its parent it is that command: it passes signals on, ends as the command ended, and takes
it along when killed.
"""

# ruff: noqa: PTH103, PTH110, PTH112, PTH123 - importing pathlib takes as long as all the rest

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

HOME = "/home/user"
PRIVATE = ("/tmp", "/run", "/dev/shm", "/home")

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_REST = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
MNT_DETACH = 2
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
PR_SET_PDEATHSIG = 1
PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: bytes | int) -> None:
    """Call a function of the C library that returns 0 when all is well."""
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def keep(folder: str, *shown: str) -> None:
    call("unshare", CLONE_NEWNET)
    print(os.getpid(), flush=True)
    booted = []
    for line in sys.stdin:
        booted.append(boot(line.strip(), folder, shown))
        print(booted[-1], flush=True)
    for pid in booted:  # none was waited for yet, so no pid can have a new owner
        os.kill(pid, signal.SIGKILL)
    for pid in booted:
        os.waitpid(pid, 0)


def boot(name: str, folder: str, shown: tuple[str, ...]) -> int:
    """Return the pid of a new host's first process, which is ready for others to enter."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    is_kept, keeps = os.pipe()
    is_up, comes_up = os.pipe()
    call("unshare", CLONE_NEWPID)  # whatever is forked next is the first process of its own
    pid = os.fork()
    if pid == 0:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(keeps)
        if not os.read(is_kept, 1):  # the keeper was gone before it could take this along
            os._exit(1)
        furnish(name, folder, shown)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what comes to it
        os.write(comes_up, b".")
        while True:
            signal.pause()
    call("setns", own, CLONE_NEWPID)
    os.close(comes_up)
    os.write(keeps, b".")
    if not os.read(is_up, 1):
        sys.exit(f"host {name} did not come up")
    for descriptor in (own, is_kept, keeps, is_up):
        os.close(descriptor)
    return pid


def furnish(name: str, folder: str, shown: tuple[str, ...]) -> None:
    """Give the calling process a host's network, name and file system."""
    call("unshare", CLONE_REST)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    seen = {path: os.open(path, os.O_PATH) for path in shown}
    for path in PRIVATE:
        mount("tmpfs", path, "tmpfs", options="mode=1777")
    for path, descriptor in seen.items():
        os.makedirs(path)
        mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND | MS_REC)
    mount(f"{folder}/etc/{name}", "/etc/hosts", flags=MS_BIND)
    if os.path.exists("/etc/resolv.conf"):
        mount("/dev/null", "/etc/resolv.conf", flags=MS_BIND)  # an unknown name is one at once
    os.makedirs(HOME, exist_ok=True)
    if os.path.isdir(f"{folder}/home"):
        mount(f"{folder}/home", HOME, flags=MS_BIND)
    mount("proc", "/proc", "proc")
    call("umount2", b"/sys", MNT_DETACH)  # cgroups with it, which hosts would have in common
    mount("sysfs", "/sys", "sysfs")
    with open("/proc/sys/kernel/hostname", "w") as file:
        file.write(name)


def enter(pid: str, directory: str, *command: str) -> None:
    host = os.pidfd_open(int(pid))
    call("setns", host, CLONE_NEWPID)  # for what is forked
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    is_kept, keeps = os.pipe()
    program = os.fork()
    if program == 0:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(keeps)
        if not os.read(is_kept, 1):
            os._exit(1)
        call("setns", host, CLONE_REST)
        become(directory, command)
    for signum in PASSED_ON:
        signal.signal(signum, lambda signum, _: os.kill(program, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.write(keeps, b".")
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os._exit(code)


def become(directory: str, command: tuple[str, ...]) -> None:
    """Turn the calling process into a command that finds itself as a login would leave it."""
    os.setsid()
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, others do not
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    try:
        os.chdir(directory)
        os.execvpe(command[0], command, {**os.environ, "HOME": HOME})
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    {"keep": keep, "enter": enter}[sys.argv[1]](*sys.argv[2:])
