"""What tests of clusters rely on: hosts that are apart, faults that are real, nothing left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hosts
import psutil
import pytest
from support import until

from msrun.supervise.process import is_alive

pytestmark = pytest.mark.process

QUIET = 0.3
"""Seconds for which nothing comes where nothing may; TCP has sent again once by then."""
PORT = 7000  # of a network that only the test has

# Writes down what it gets, then sends it back.
SERVER = f"""
    import socket, sys
    listener = socket.create_server(("::", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
    print("up", flush=True)
    while True:
        stream = listener.accept()[0].makefile("rw")
        with open(sys.argv[1], "a") as log:
            for line in stream:
                print(line, end="", file=log, flush=True)
                print(line, end="", file=stream, flush=True)
"""
# Sends each line of standard input, and prints what comes back, "end" for the end.
CLIENT = f"""
    import socket, sys, threading
    stream = socket.create_connection((sys.argv[1], {PORT}), timeout=None).makefile("rw")
    def receive():
        try:
            for line in stream:
                print(line, end="", flush=True)
        finally:
            print("end", flush=True)
    threading.Thread(target=receive, daemon=True).start()
    print("connected", flush=True)
    for line in sys.stdin:
        print(line, end="", file=stream, flush=True)
"""


def test_what_a_machine_lacks_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    assert hosts.missing() == "no ip and no nsenter and no tc on PATH"


def python(text, *arguments):
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(text), *arguments]


class Echo:
    """A server on one host, and a client of it on another."""

    def __init__(self, client, server, address=None):
        self.log = client.lab.folder / "received"
        self.server = server.popen(python(SERVER, self.log), stdout=subprocess.PIPE)
        assert self.server.stdout.readline() == "up\n"
        words = python(CLIENT, address or server.name)
        self.client = client.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.client.stdout.readline() == "connected\n"

    def send(self, line):
        print(line, file=self.client.stdin, flush=True)

    def hears(self, seconds=hosts.PATIENCE):
        """Return the next line at the client, None when none comes."""
        is_there = select.select([self.client.stdout], [], [], seconds)[0]
        return self.client.stdout.readline().rstrip() if is_there else None

    def received(self):
        return self.log.read_text().split()


# Hosts are apart.


@pytest.mark.parametrize("address", ["b", "10.77.0.2", "fd00:77::2"])
def test_hosts_reach_each_other(lab, address):
    echo = Echo(*lab.hosts[:2], address)
    echo.send("hello")

    assert (echo.hears(), echo.received()) == ("hello", ["hello"])


def test_a_host_has_its_own_name_processes_and_private_directories(lab):
    a, b, _ = lab.hosts
    show = "hostname; echo $$; ls -d /tmp/x /run/x /dev/shm/x /home/user/x 2>&1 | wc -l"
    a.run(["sh", "-c", "touch /tmp/x /run/x /dev/shm/x /home/user/x"])

    assert a.run(["sh", "-c", show]).stdout.split()[0] == "a"
    assert b.run(["ls", "/tmp/x", "/run/x", "/dev/shm/x"]).stdout == ""
    assert (lab.folder / "home/x").exists()
    assert b.run(["ls", "/home/user"]).stdout == "x\n"
    assert a.file("/tmp/x").exists()
    assert not b.file("/tmp/x").exists()


def test_homes_can_be_private_and_addresses_of_one_family(new_lab):
    a, b = new_lab("a", "b", families=(6,), shared_home=False).hosts
    a.run(["touch", "/home/user/x"])

    assert b.run(["ls", "/home/user"]).stdout == ""
    assert a.run(["getent", "ahosts", "b"]).stdout.split()[0] == "fd00:77::2"
    assert "10.77" not in a.run(["ip", "addr"]).stdout


def test_a_host_can_be_told_wrong_addresses(lab):
    a = lab.host("a")
    a.know({"b": ["127.0.1.1"]})

    assert a.run(["getent", "hosts", "b"]).stdout.split() == ["127.0.1.1", "b"]


def test_the_machine_outside_is_untouched(new_lab):
    def machine():
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        # A test beside this one may have a disk that hangs; no host of a lab mounts any.
        mounts = [line for line in mounts if " - fuse " not in line]
        return links.stdout, mounts, os.uname().nodename, Path("/etc/hosts").read_text()

    before = machine()
    new_lab("a", "b")

    assert machine() == before


# Programs.


@pytest.mark.parametrize("code", [0, 3, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV])
def test_a_program_ends_as_it_would_here(lab, code):
    program = f"exit {code}" if code >= 0 else f"ulimit -c 0; kill -{-code} $$"

    assert lab.host("a").run(["sh", "-c", program]).returncode == code


def test_what_cannot_be_run_is_named(lab):
    done = lab.host("a").run(["no-such-program"])

    assert (done.returncode, done.stderr.split(":")[0]) == (127, "no-such-program")


def test_signals_reach_the_program_and_its_death_is_its_own(lab):
    script = "trap 'echo caught' USR1; echo up; while :; do sleep 0.01; done"
    program = lab.host("a").popen(["sh", "-c", script], stdout=subprocess.PIPE)
    said = program.stdout.readline()
    program.send_signal(signal.SIGUSR1)

    assert [said, program.stdout.readline()] == ["up\n", "caught\n"]
    program.terminate()
    assert program.wait() == -signal.SIGTERM


def test_a_kill_from_outside_takes_the_program_along(lab):
    a = lab.host("a")
    program = a.popen(["sleep", "1000"])
    until(lambda: _commands(a) == ["sleep 1000"], "for the program")
    program.kill()

    assert program.wait() == -signal.SIGKILL
    until(lambda: not a.processes(), "for an empty host")


def test_a_run_that_takes_too_long_is_ended(lab):
    a = lab.host("a")
    with pytest.raises(subprocess.TimeoutExpired):
        a.run(["sleep", "1000"], timeout=0.1)

    until(lambda: not a.processes(), "for an empty host")


def _commands(host):
    with contextlib.suppress(psutil.NoSuchProcess):
        return [" ".join(process.cmdline()) for process in host.processes()]
    return []


# Faults.


@pytest.mark.parametrize("address", ["10.77.0.2", "fd00:77::2"])
@pytest.mark.parametrize(
    ("fault", "received"),
    [
        (lambda _, b: b.cut(), []),
        (lambda a, b: a.lab.cut(a, b), []),
        (lambda a, b: a.lab.cut(a, b, one_way=True), []),
        (lambda a, b: a.lab.cut(b, a, one_way=True), ["over"]),
    ],
    ids=["cable", "pair", "to the server", "from the server"],
)
@pytest.mark.few(3)
def test_a_cut_is_silent_and_a_heal_restores_what_was_sent(lab, fault, received, address):
    a, b, c = lab.hosts
    echo = Echo(a, b, address)
    fault(a, b)
    echo.send("over")

    assert (echo.hears(QUIET), echo.received()) == (None, received)
    assert a.run(python(REACHES, c.ipv4)).stdout == "reached\n"
    lab.heal()
    assert (echo.hears(), echo.received()) == ("over", ["over"])


# A host that refuses has been reached.
REACHES = f"""
    import socket, sys
    try:
        socket.create_connection((sys.argv[1], {PORT}))
    except ConnectionRefusedError:
        print("reached")
"""


def test_a_power_cut_tells_the_peers_nothing(lab):
    echo = Echo(*lab.hosts[:2])
    lab.host("b").power_off()

    assert echo.hears(QUIET) is None
    assert echo.server.wait() == -signal.SIGKILL


def test_the_death_of_all_programs_is_told_to_the_peers(lab):
    a, b, _ = lab.hosts
    echo = Echo(a, b)
    b.kill_all()

    assert echo.hears() == "end"
    assert a.run(python(REACHES, b.ipv4)).stdout == "reached\n"


def test_a_power_cut_leaves_no_process_cable_or_network(lab):
    b = lab.host("b")
    b.popen(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    until(lambda: len(b.processes()) == 3, "for the programs")
    pids = [b.pid, *(process.pid for process in b.processes())]
    b.power_off()

    assert [pid for pid in pids if is_alive(pid)] == []
    assert _ports(lab) == ["port1", "port3"]
    until(lambda: len(_networks(lab)) == 2, "for the end of the network of the host")


def test_a_host_comes_back_under_its_name_and_without_its_past(lab):
    a, b, _ = lab.hosts
    b.run(["touch", "/tmp/x"])
    b.power_off()
    b.boot()

    assert b.run(["ls", "/tmp/x"]).stdout == ""
    echo = Echo(a, b)
    echo.send("hello")
    assert echo.hears() == "hello"


def test_one_process_or_a_whole_host_can_be_frozen(lab):
    a, b, _ = lab.hosts
    echo = Echo(a, b)
    (server,) = b.processes()
    for pids in [(server.pid,), ()]:
        b.freeze(*pids)
        echo.send("over")
        assert (echo.hears(QUIET), server.status()) == (None, psutil.STATUS_STOPPED)
        b.thaw(*pids)
        assert echo.hears() == "over"


def test_no_stranger_is_frozen(lab):
    with pytest.raises(KeyError):
        lab.host("a").freeze(os.getpid())


SINK = f"""
    import socket
    listener = socket.create_server(("::", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
    print("up", flush=True)
    while True:
        with listener.accept()[0] as connection:
            while not connection.recv(1 << 20).endswith(b"."):
                pass
            connection.sendall(b".")
"""
# The bucket holds 32 KiB; the other 67 kB take at least half a second.
UPLOAD = f"""
    import socket, sys, time
    with socket.create_connection((sys.argv[1], {PORT})) as connection:
        start = time.monotonic()
        connection.sendall(b"x" * 99_999 + b".")
        connection.recv(1)
        print(time.monotonic() - start)
"""


def test_a_cable_can_be_slow(lab):
    a, b, _ = lab.hosts
    server = b.popen(python(SINK), stdout=subprocess.PIPE)
    assert server.stdout.readline() == "up\n"
    a.rate_limit("1mbit")
    slow = float(a.run(python(UPLOAD, "b")).stdout)
    a.rate_limit(None)
    fast = float(a.run(python(UPLOAD, "b")).stdout)

    assert (slow > 0.5, fast < slow) == (True, True)


COUNT = """
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", 9))
        print("up", flush=True)
        sock.settimeout(10)
        while (number := int(sock.recv(9))) < 1000:
            print(number, flush=True)
"""
TELL = """
    import socket, sys, time

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for number in [*range(500), *[1000] * 50]:
            sock.sendto(b"%d" % number, (sys.argv[1], 9))
            time.sleep(0.001)
"""


def test_a_cable_can_lose_double_and_reorder_frames(lab):
    a, b = lab.hosts[:2]
    b.spoil(0.2)
    receiver = b.popen(python(COUNT), stdout=subprocess.PIPE)
    assert receiver.stdout.readline() == "up\n"
    a.run(python(TELL, b.ipv4))
    numbers = [int(line) for line in receiver.communicate(timeout=20)[0].split()]

    assert 300 < len(set(numbers)) < 480
    assert len(numbers) > len(set(numbers)) + 20
    assert sum(late < early for early, late in itertools.pairwise(numbers)) > 20


# Clocks.

TELL_TIME = """
    import sys, time
    for line in sys.stdin:
        print(time.time() - float(line), time.gmtime().tm_year, time.monotonic(), flush=True)
"""


def test_a_wall_clock_can_be_wrong_and_jump_and_others_do_not(lab, clock):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    program = lab.host("a").popen(python(TELL_TIME), env=clock.env, **streams)
    hour, ten_years = 3600, 10 * 366 * 86400
    for wrong in (0, -60, hour, ten_years):
        clock.set_wrong(wrong)
        print(time.time(), file=program.stdin, flush=True)
        ahead, year, monotonic = map(float, program.stdout.readline().split())

        assert 0 <= ahead - wrong < hosts.PATIENCE
        assert year == time.gmtime(time.time() + wrong).tm_year
        assert 0 <= time.monotonic() - monotonic < hosts.PATIENCE


def test_a_monotonic_clock_can_have_stood_still(lab, clock):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    program = lab.host("a").popen(python(TELL_TIME), env=clock.env, **streams)
    for seconds in (0, 1000.5):
        clock.stood_still(seconds)
        print(time.time(), file=program.stdin, flush=True)
        ahead, _, monotonic = map(float, program.stdout.readline().split())

        assert 0 <= ahead < hosts.PATIENCE
        assert 0 <= time.monotonic() - seconds - monotonic < hosts.PATIENCE


# The end of the tests.

# Stands for the tests' process.
TESTS = """
    import sys
    from pathlib import Path
    from hosts import Lab

    lab = Lab(Path(sys.argv[1]), "a", "b")
    for host in lab.hosts:
        host.popen(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    print(*(host.pid for host in lab.hosts), flush=True)
    input()
"""


def test_killed_tests_leave_nothing(lab_folder):
    folder = Path(hosts.__file__).parent
    tests = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TESTS), lab_folder],
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with tests:
        first = [int(pid) for pid in tests.stdout.readline().split()]
        for pid in first:
            until(lambda pid=pid: len(hosts.living_in(pid)) == 4, "for the programs of a host")
        started = psutil.Process(tests.pid).children(recursive=True)
        tests.kill()

    # A keeper, and on each host its first process, a way in and three programs.
    assert len(started) == 11
    until(lambda: not any(process.is_running() for process in started), "for the end of all")


def _ports(lab):
    """Return the names of the cables in the switch."""
    return [link["ifname"] for link in _ip(lab, "link") if link["ifname"].startswith("port")]


def _networks(lab):
    """Return what the switch knows of the networks at the other ends of its cables."""
    return _ip(lab, "netns", "list-id")


def _ip(lab, *words):
    argv = ["nsenter", "-t", str(lab.pid), "-n", "ip", "-json", *words]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
