"""Hosts made of Linux namespaces: several machines on one, for tests of real clusters.

    with Lab(tmp_path, "a", "b") as lab:
        a, b = lab.hosts
        server = a.popen(["python3", "server.py"])
        lab.cut(a, b)

Each host has its own network with an address of each family on one switch, host name,
/etc/hosts, process numbers, /tmp, /run, /dev/shm and /home; the rest of the file system is
this machine's.  Nothing of a lab can be met from outside it, and nothing outlives the process
that made it, however that ends: `namespaces.py` says why.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
from namespaces import PRIVATE

from msrun.supervise.process import is_alive

PATIENCE = 10.0
"""Seconds in which the kernel must have done what it was asked for."""
_PROGRAMS = [sys.executable, "-I", "-S", str(Path(__file__).with_name("namespaces.py"))]
_BAD_CABLE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("bad_cable.py"))]
_NOBODY = "02:00:00:00:00:00"
_TOOLS = ("ip", "nsenter", "tc")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def missing() -> str | None:
    """Return what this machine lacks for a lab, None when it has all."""
    tools = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if tools:
        return f"no {' and no '.join(tools)} on PATH"
    effective = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    lacking = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    return f"no {' and no '.join(lacking)}: run the tests as root" if lacking else None


class Lab:
    """A switch and the hosts on it; close it, or use it as a context manager.

    Args:
        folder: Directory that the hosts and the tests see at the same path.
        names: Host names, which every host can resolve.
        families: IP versions of the addresses that hosts have and know each other by.
        shared_home: Whether the hosts share their home directory, or each has its own.
    """

    def __init__(
        self,
        folder: Path,
        *names: str,
        families: Sequence[int] = (4, 6),
        shared_home: bool = True,
    ) -> None:
        self.folder = folder / "lab"
        self.families = families
        (self.folder / "etc").mkdir(parents=True)
        if shared_home:
            (self.folder / "home").mkdir()
        self.hosts = [Host(self, name, number) for number, name in enumerate(names, 1)]
        self.ending = contextlib.ExitStack()
        self._keeper = subprocess.Popen(
            [*_PROGRAMS, "keep", str(self.folder), *_hidden(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self.pid = self._answer()
            bridge = "link add switch type bridge mcast_snooping 0", "link set switch up"
            configure(self.pid, bridge)
            self.boot(*self.hosts)
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def boot(self, *hosts: Host) -> None:
        """Switch hosts on; again is with the same name and addresses and an empty /tmp."""
        everyone = {host.name: host.addresses for host in self.hosts}
        for host in hosts:
            host.know(everyone)
            print(host.name, file=self._keeper.stdin)
        self._keeper.stdin.flush()
        for host in hosts:
            host.plug_in(self._answer())

    def add(self, name: str) -> Host:
        """Switch on one more host, with the lowest free address."""
        used = {host.number for host in self.hosts}
        number = next(number for number in itertools.count(1) if number not in used)
        host = Host(self, name, number)
        self.hosts.append(host)
        self.boot(host)
        return host

    def remove(self, host: Host) -> None:
        """Forget a host that is off, so that others can have its address."""
        self.hosts.remove(host)

    def _answer(self) -> int:
        line = self._keeper.stdout.readline()
        if not line:
            raise RuntimeError(f"the lab's keeper ended with code {self._keeper.wait()}")
        return int(line)

    def cut(self, one: Host, other: Host, *, one_way: bool = False) -> None:
        """Lose without a trace what `one` sends to `other`, and the reverse."""
        one.misdirect(other)
        if not one_way:
            other.misdirect(one)

    def heal(self) -> None:
        """Let every host reach every other again."""
        for host in self.hosts:
            if host.pid:
                host.heal()

    def close(self) -> None:
        """End every process of the lab; returns when all are gone."""
        with self.ending, self._keeper as keeper:
            keeper.stdin.close()
            try:
                keeper.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                keeper.kill()
                raise


class Host:
    """A machine of a lab.

    Attributes:
        pid: Its first process, as this machine numbers it; 0 while it is off.
    """

    def __init__(self, lab: Lab, name: str, number: int) -> None:
        self.lab = lab
        self.name = name
        self.number = number
        self.pid = 0
        self.ipv4 = f"10.77.0.{number}"
        self.ipv6 = f"fd00:77::{number:x}"
        self._port = f"port{number}"

    @property
    def addresses(self) -> list[str]:
        """Its addresses in the order of the lab's families."""
        return [{4: self.ipv4, 6: self.ipv6}[family] for family in self.lab.families]

    def know(self, names: Mapping[str, Iterable[str]]) -> None:
        """Write this host's /etc/hosts: the addresses of each name, besides localhost."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {name}" for name, found in names.items() for address in found]
        (self.lab.folder / "etc" / self.name).write_text("\n".join([*lines, ""]))

    def plug_in(self, pid: int) -> None:
        """Connect the host whose first process is `pid` with the switch."""
        self.pid = pid
        link = f"link add {self._port} type veth peer name eth0 netns {pid}"
        configure(self.lab.pid, [link, f"link set {self._port} master switch up"])
        v4 = [f"addr add {self.ipv4}/24 dev eth0"]
        v6 = [f"addr add {self.ipv6}/64 dev eth0 nodad"]
        out = {4: "route add default via 10.77.0.254", 6: "route add default via fd00:77::fe"}
        addresses = [line for family in self.lab.families for line in {4: v4, 6: v6}[family]]
        routes = [out[family] for family in self.lab.families]
        configure(pid, ["link set lo up", *addresses, "link set eth0 up", *routes])

    # Programs.

    def enter(self, cwd: Path | str | None = None) -> list[str]:
        """Return the words before a command that run it here, below the directory `cwd`.

        The process behaves to the tests as the command itself would: signals, also KILL, exit
        code.  Only STOP does not reach the command; see `freeze`.
        """
        return [*_PROGRAMS, "enter", str(self.pid), str(cwd or Path.cwd())]

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        **options: object,
    ) -> subprocess.Popen[str]:
        """Start a command, with `env` on top of the tests' environment; it ends with the lab."""
        words = [*self.enter(cwd), *map(str, argv)]
        options = {"stdin": subprocess.DEVNULL, "text": True, **options}
        program = subprocess.Popen(words, env={**os.environ, **(env or {})}, **options)
        return self.lab.ending.enter_context(program)

    def run(
        self, argv: Sequence[str | Path], *, timeout: float = PATIENCE, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, by force after `timeout` seconds."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        with self.popen(argv, **options) as program:
            try:
                out, err = program.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                program.kill()
                raise
        return subprocess.CompletedProcess(argv, program.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """Return every process here but the first."""
        return [process for process in living_in(self.pid) if process.pid != self.pid]

    def file(self, path: str) -> Path:
        """Return where the tests find what this host has at an absolute path."""
        return Path(f"/proc/{self.pid}/root{path}")

    # Faults.

    def cut(self) -> None:
        """Pull the cable."""
        configure(self.lab.pid, [f"link set {self._port} down"])

    def heal(self) -> None:
        """Plug the cable in, and find the way to every other host again."""
        configure(self.lab.pid, [f"link set {self._port} up"])
        configure(self.pid, ["neigh flush dev eth0 nud permanent"])

    def misdirect(self, other: Host) -> None:
        """Send what is for `other` to an interface that nobody has."""
        wrong = [f"neigh replace {to} lladdr {_NOBODY} dev eth0" for to in other.addresses]
        configure(self.pid, wrong)

    def rate_limit(self, rate: str | None) -> None:
        """Make the cable as slow as `rate`, such as "1mbit", in both directions; None ends it."""
        queue = f"tbf rate {rate} burst 32kb latency 400ms" if rate else "noqueue"
        for pid, device in ((self.lab.pid, self._port), (self.pid, "eth0")):
            configure(pid, [f"qdisc replace dev {device} root {queue}"], tool="tc")

    def spoil(self, share: float) -> None:
        """Have the cable lose that share of all frames, double as many, and reorder as many."""
        near, far = f"near{self._port}", f"far{self._port}"
        lines = [
            f"link set {self._port} nomaster",
            f"link add {near} type veth peer name {far}",
            f"link set {near} up",
            f"link set {far} master switch up",
        ]
        configure(self.lab.pid, lines)
        inside = ["nsenter", "-t", str(self.lab.pid), "-n", *_BAD_CABLE]
        words = [*inside, str(share), self._port, near]
        cable = self.lab.ending.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE))
        self.lab.ending.callback(cable.kill)

    def power_off(self) -> None:
        """End this host as a power cut does: not one more packet tells its peers."""
        configure(self.lab.pid, [f"link del {self._port}"])
        end = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(end, signal.SIGKILL)
            if not select.select([end], [], [], PATIENCE)[0]:
                raise TimeoutError(f"host {self.name} did not end within {PATIENCE:g} s")
        finally:
            os.close(end)
        self.pid = 0

    def boot(self) -> None:
        """Switch this host on again."""
        self.lab.boot(self)

    def kill_all(self) -> None:
        """SIGKILL every program at once; the host stays, and its kernel tells the peers."""
        self._signal(signal.SIGKILL)

    def freeze(self, *pids: int) -> None:
        """SIGSTOP processes of this host, all by default."""
        self._signal(signal.SIGSTOP, *pids)

    def thaw(self, *pids: int) -> None:
        """SIGCONT processes of this host, all by default."""
        self._signal(signal.SIGCONT, *pids)

    def _signal(self, signum: signal.Signals, *pids: int) -> None:
        if not pids:
            self.run(["sh", "-c", f"kill -{signum:d} -1"])  # all but the first and the shell
        own = {process.pid: process for process in self.processes()}
        for pid in pids:
            own[pid].send_signal(signum)


def configure(pid: int, lines: Iterable[str], *, tool: str = "ip") -> None:
    """Run lines of `ip` or `tc` in the network of the process `pid`."""
    argv = ["nsenter", "-t", str(pid), "-n", tool, "-batch", "-"]
    done = subprocess.run(  # its own words say more than an exception
        argv, check=False, input="\n".join(lines), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{tool} ended with code {done.returncode}: {done.stderr}")


def living_in(first: int) -> list[psutil.Process]:
    """Return the processes in the pid namespace of the process `first`, none if that is gone."""
    namespace = _namespace(first)
    found = (process for process in psutil.process_iter() if _namespace(process.pid) == namespace)
    return [process for process in found if namespace and is_alive(process.pid)]


def _namespace(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink()
    return None


def _hidden(folder: Path) -> list[str]:
    """Return what programs need of the directories that are private on a host, outermost only."""
    needed = [folder, Path(__file__).parents[2], Path.cwd(), sys.prefix, sys.base_prefix, *sys.path]
    paths = {Path(path).absolute() for path in needed if Path(path).is_dir()}
    hidden = [path for path in paths if any(path.is_relative_to(top) for top in PRIVATE)]
    return [str(path) for path in hidden if not paths & set(path.parents)]
