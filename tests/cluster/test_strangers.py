"""Who does not hold the job's key, and the store: another user of the machine, another host.

They can neither read nor write it, nor grow it, nor delay the workers by more than a second.
"""

import contextlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import skip_without
from support import script, until

pytestmark = pytest.mark.process

USER = 1001
CROWD = 6000
REFUSED = ("closed", "ConnectionResetError", "BrokenPipeError")
LISTENS = "0A"
GROWTH_MAX = 64 << 20
LINE = re.compile(r'\["|\[\d')  # and no warning of torch's

# Speaks torch's store protocol; prints what it got as hexadecimal digits, and how it ended.
THIEF = """
import socket, struct, sys
def text(value):
    return struct.pack("<Q", len(value)) + value
host, port = sys.argv[1], int(sys.argv[2])
with socket.socket() as sock:
    sock.settimeout(5)
    got = b""
    try:
        sock.connect((host, port))
        sock.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
        sock.sendall(b"\\x01" + text(b"/stolen") + text(b"mine"))
        sock.sendall(b"\\x01" + text(b"/secret") + text(b"forged"))
        sock.sendall(b"\\x03" + text(b"/secret"))
        while data := sock.recv(4096):
            got += data
        print(got.hex() or "nothing", "closed")
    except TimeoutError:
        print(got.hex() or "nothing", "waiting")
    except OSError as error:
        print(got.hex() or "nothing", type(error).__name__)
"""

# Holds as many connections as it can and writes into each without end.
FLOOD = """
import resource, select, socket, struct, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
part = struct.pack("<BI", 0, 0x3C85F7CE) + b"\\x01" + struct.pack("<Q", 3) + b"/k0"
part += struct.pack("<Q", 8 << 20) + bytes(60000)
poll, socks, made = select.epoll(), {}, 0
while True:
    while len(socks) < count:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((host, port))
        poll.register(sock, select.EPOLLOUT | select.EPOLLIN)
        socks[sock.fileno()] = sock
        made += 1
        if made == count:
            print("crowded", flush=True)
        if made % 256 == 0:
            break
    for fd, event in poll.poll(0.01, 512):
        try:
            if event & (select.EPOLLHUP | select.EPOLLERR):
                raise OSError
            if event & select.EPOLLIN and not socks[fd].recv(65536):
                raise OSError
            if event & select.EPOLLOUT:
                socks[fd].send(part)
        except BlockingIOError:
            pass
        except OSError:
            poll.unregister(fd)
            socks.pop(fd).close()
"""

# Rank 0 keeps a secret.  When told to go on, every rank says how long a meeting took and what
# has become of the store.
WORKER = """
    import json, os, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch.distributed as dist
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["RANK"]
    began = time.monotonic()
    own = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    if rank == "0":
        own.set("secret", "treasure")
    own.wait(["secret"])
    if os.environ["MSRUN_GENERATION"] == "0":
        print(json.dumps([host, port]), flush=True)
        while not Path(sys.argv[1]).exists():
            time.sleep(0.01)
        if sys.argv[2:]:
            sys.exit(3)
        began = time.monotonic()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for _ in range(3):
        dist.barrier()
        dist.new_group()
    took = time.monotonic() - began
    found = [own.get("secret").decode(), own.check(["stolen"]), own.check(["k0"])]
    print(json.dumps([took, *found]), flush=True)
    dist.destroy_process_group()
"""


class Meeting:
    """A job that waits, so that strangers have time, and then meets."""

    def __init__(self, lab, nodes):
        self.lab = lab
        self.nodes = nodes
        self.of_ranks = [node for node in nodes for _ in range(2)]
        self.ranks = range(len(self.of_ranks))

    def lines(self):
        """Return what each rank has printed."""
        logs = [node.log(rank) for rank, node in zip(self.ranks, self.of_ranks, strict=True)]
        return [[json.loads(x) for x in log.splitlines() if LINE.match(x)] for log in logs]

    def wait_up(self):
        ended = lambda: any(node.process.poll() is not None for node in self.nodes)  # noqa: E731
        until(lambda: all(self.lines()) or ended(), "for all ranks")
        assert all(self.lines())

    def store_of(self, number):
        """Return process and address of a node's store."""
        store = self.nodes[number].find("msrun store")
        return store, [tuple(line[0]) for line in self.lines()][number * 2]

    def ports(self, number):
        """Return where the store's process of a node listens on the network."""
        own = Path("/proc", str(self.nodes[number].find("msrun store").pid))
        held, found = set(), set()
        for descriptor in (own / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                held.add(str(descriptor.readlink()))
        for line in (own / "net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            (address, port), is_held = fields[1].split(":"), f"socket:[{fields[9]}]" in held
            if fields[3] == LISTENS and is_held and not address.endswith("7F"):
                found.add(int(port, 16))
        return sorted(found)

    def meet(self):
        """Have the ranks meet; return the longest time of one and what they found."""
        (self.lab.folder / "go").touch()
        assert [node.wait(90) for node in self.nodes] == [0] * len(self.nodes)
        lines = [line[1] for line in self.lines()]
        return max(line[0] for line in lines), [line[1:] for line in lines]


@pytest.fixture
def meeting(new_lab, form, launch, lab_folder):
    """Start such a job of two workers a node on the hosts of a lab but the last."""

    def start(*names, again=False):
        folder = lab_folder / names[0]
        folder.mkdir()
        lab = new_lab(*names, "stranger", folder=folder)
        program = script(lab.folder, WORKER)
        words = ["--workers-per-node", 2, program, lab.folder / "go", *["again"] * again]
        words[:0] = ["--max-restarts", 1] if again else []
        if len(names) == 1:
            nodes = [launch(lab.host(names[0]), *words)]
        else:
            nodes = form(lab.hosts[:-1], "--nnodes", len(names), *words)
        found = Meeting(lab, nodes)
        found.wait_up()
        return found

    return start


def stranger(host, text, *words, user=None):
    """Start a program on a host, as another user."""
    who = []
    if user is not None:
        skip_without("other user", None if shutil.which("setpriv") else "no setpriv on PATH")
        who = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    command = [*who, sys.executable, "-I", "-S", "-c", text, *map(str, words)]
    return host.popen(command, cwd="/", stdout=-1)


def untouched(found):
    return found == [["treasure", False, False]] * len(found)


def test_another_user_neither_reads_nor_writes_the_store(meeting):
    """S-14."""
    job = meeting("a")
    _, address = job.store_of(0)
    host = job.lab.host("a")

    said = stranger(host, THIEF, *address, user=USER).communicate()[0]
    _, found = job.meet()

    assert said.split() in [["nothing", how] for how in REFUSED]
    assert untouched(found)
    assert "refused a connection of others than the job's user" in job.nodes[0].err


def test_another_users_request_that_is_sent_and_left_is_not_read(meeting):
    """S-15: a socket that its process has closed is user 0's for the kernel, and we are user 0."""
    job = meeting("a")
    _, address = job.store_of(0)
    hit_and_run = THIEF.replace("        while data", "        sys.exit()\n        while data")

    for _ in range(50):
        stranger(job.lab.host("a"), hit_and_run, *address, user=USER).wait()

    assert untouched(job.meet()[1])


@pytest.mark.slow
def test_a_crowd_of_another_user_delays_by_less_than_a_second_and_fills_no_memory(meeting):
    """S-17."""
    quiet, _ = meeting("a", again=True).meet()
    job = meeting("b", again=True)
    store, address = job.store_of(0)
    before = store.memory_info().rss
    crowd = stranger(job.lab.host("b"), FLOOD, *address, CROWD, user=USER)
    assert crowd.stdout.readline() == "crowded\n"

    grown = store.memory_info().rss - before
    took, found = job.meet()

    print(f"{quiet:.2f} s quiet, {took:.2f} s in a crowd; grown by {grown} bytes")
    crowd.kill()
    assert untouched(found)
    assert took < quiet + 1
    assert grown < GROWTH_MAX


def test_another_host_neither_reads_nor_writes_the_store(meeting):
    """S-16."""
    job = meeting("a", "b")
    outside = job.lab.host("stranger")
    reached = [(job.lab.host("ab"[n]).ipv4, port) for n in (0, 1) for port in job.ports(n)]

    said = [stranger(outside, THIEF, *address).communicate()[0].split() for address in reached]
    _, found = job.meet()

    assert reached
    # What every server of ZeroMQ says first, to whoever connects.
    assert all(got[0] == "nothing" or got[0].startswith("ff0000000000000001") for got in said)
    assert untouched(found)


@pytest.mark.slow
def test_a_crowd_of_another_host_delays_by_less_than_a_second(meeting):
    """S-18."""
    quiet, _ = meeting("a", "b", again=True).meet()
    job = meeting("c", "d", again=True)
    (port,) = job.ports(0)
    crowd = stranger(job.lab.host("stranger"), FLOOD, job.lab.host("c").ipv4, port, CROWD)
    assert crowd.stdout.readline() == "crowded\n"

    took, found = job.meet()

    print(f"{quiet:.2f} s quiet, {took:.2f} s in a crowd")
    crowd.kill()
    assert untouched(found)
    assert took < quiet + 1
