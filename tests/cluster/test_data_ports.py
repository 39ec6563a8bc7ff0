"""Strangers at the ports on which gloo exchanges tensors, while the store is closed to them.

Gloo takes every connection that begins with the number of one that it waits for, and these are
small.  So a stranger can take the place of a rank, and end the job.  What we promise is that it
ends in bounded time, with the right result or with a verdict that says which rank failed and how.
On one node nothing that comes from another user is used, and the verdict names that user.  On
several nodes none of their code runs where ranks exchange tensors alone.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support import script, shell, until
from test_strangers import USER, stranger

pytestmark = pytest.mark.process

CONNECTIONS = 64
CROWD = 3000
GROUP_SECONDS = 10
# Starting torch on a busy machine, what the group waits for twice, and the end of the others.
END_SECONDS = 90
NAMED = f"user {USER} of this machine has taken the place of a rank"
PORTS = re.compile(r"\[\d+\]")

# Connects again and again, in one of several ways, and says when it has done so the first time.
ATTACK = """
import os, pickle, resource, select, socket, struct, sys
mode, count = sys.argv[1], int(sys.argv[2])
places = [(host, int(port)) for host, port in (word.split(":") for word in sys.argv[4:])]
class Code:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[3]}",)
load = pickle.dumps(Code())
def said(number):
    first = struct.pack("<q", number)
    # As gloo sends: bytes, operation, slot, and three numbers more.
    header = lambda kind, slot, size: struct.pack("<6Q", 48 + size, kind, slot, 0, size, 0)
    return {
        "silent": b"",
        "garbage": os.urandom(4096),
        "place": first,
        "answer": first,
        "place-garbage": first + os.urandom(4096),
        "place-load": first + b"".join(
            header(kind, slot, len(load)) + load
            for slot in (0, 7 << 56, (7 << 56) + 1) for kind in (0, 1)
        ),
    }[mode]
# What `broadcast_object_list` gets: the length of a pickle, then the pickle.
def answer(data):
    for at in range(0, len(data) // 48 * 48, 48):
        _, kind, slot, _, size, _ = struct.unpack_from("<6Q", data, at)
        if kind == 3:  # the peer has memory for a message
            part = struct.pack("<q", len(load)) if size == 8 else load
            yield struct.pack("<6Q", 48 + len(part), 1, slot, 0, len(part), 0) + part
poll, open_ = select.epoll(), {}
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
def connect(place, number):
    sock = socket.socket()
    sock.settimeout(2)
    try:
        sock.connect(place)
        sock.sendall(said(number))
    except OSError:
        sock.close()
        return
    sock.setblocking(False)
    open_[sock.fileno()] = sock
    poll.register(sock, select.EPOLLIN)
for number in range(count):
    for place in places:
        connect(place, number)
print("ready", flush=True)
while True:
    for fd, _ in poll.poll(1):
        try:
            data = open_[fd].recv(65536)
            gone = not data
            if mode == "answer":
                open_[fd].sendall(b"".join(answer(data)))
        except BlockingIOError:
            continue
        except OSError:
            gone = True
        if gone:
            poll.unregister(fd)
            open_.pop(fd).close()
"""

# All ranks but one, the last, wait in gloo, listening, until that one may go.
WORKER = f"""
    import contextlib, json, os, sys, threading, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist
    before = set()
    def listening():
        held = set()
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                held.add(str(path.readlink()))
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return [int(row[1].split(":")[1], 16) for row in rows
                if row[3] == "0A" and f"socket:[{{row[9]}}]" in held]
    def tell():
        while not (ports := listening()):
            time.sleep(0.01)
        print(json.dumps(ports), flush=True)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    late = size - 1
    if rank != late:
        threading.Thread(target=tell, daemon=True).start()
    while rank == late and not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    dist.init_process_group("gloo", timeout=timedelta(seconds={GROUP_SECONDS}))
    for step in range(100):
        tensor = torch.full((1000,), float(rank + step))
        dist.all_reduce(tensor)
        if not (tensor == size * (size - 1) / 2 + size * step).all():
            raise SystemExit("the sum is wrong")
    print("right", flush=True)
    dist.destroy_process_group()
"""
# The one that is late is rank 0, and the others get objects from it.  Gloo compares two ports by
# their bytes, the second first, to decide which rank connects to the other: it shall be rank 0.
OBJECTS = WORKER.replace("late = size - 1", "late = 0").replace(
    "    dist.init",
    """    if rank == late:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("20720 20735")
    dist.init""",
)
OBJECTS = OBJECTS.replace(
    "    for step in",
    """    box = [None if rank else "ours"]
    dist.broadcast_object_list(box, src=0)
    for step in""",
)


@pytest.fixture
def attacked(new_lab, form, launch):
    """Run a job of four ranks on hosts, with strangers at its data ports; return how it ended."""

    def run(hosts, mode, count=CONNECTIONS, worker=WORKER, *options):
        lab = new_lab(*hosts, "stranger")
        go = lab.folder / "go"
        words = [script(lab.folder, worker), go]
        if len(hosts) == 1:
            nodes = [launch(lab.host(hosts[0]), "--workers-per-node", 4, *options, *words)]
        else:
            nodes = form(lab.hosts[:-1], "--nnodes", 2, "--workers-per-node", 2, *words)
        of_ranks = [node for node in nodes for _ in range(4 // len(nodes))]
        logs = lambda: [node.log(rank) for rank, node in enumerate(of_ranks)]  # noqa: E731
        early = slice(-1) if worker == WORKER else slice(1, None)
        until(lambda: all(map(PORTS.search, logs()[early])), "for gloo to listen")
        ports = [json.loads(PORTS.search(log).group())[0] for log in logs()[early]]
        if len(hosts) == 1:
            outside, user = lab.host(hosts[0]), USER
            places = [f"127.0.0.1:{port}" for port in ports]
        else:
            outside, user = lab.host("stranger"), None
            addresses = [lab.host(hosts[rank // 2]).ipv4 for rank in range(4)[early]]
            places = [f"{a}:{port}" for a, port in zip(addresses, ports, strict=True)]
        mark = lab.folder / "ran"
        crowd = stranger(outside, ATTACK, mode, count, mark, *places, user=user)
        assert crowd.stdout.readline() == "ready\n"
        go.touch()
        codes = [node.wait(END_SECONDS) for node in nodes]
        crowd.kill()
        assert not mark.exists()
        verdicts = [json.loads((node.logs / "verdict.json").read_text()) for node in nodes]
        return codes, logs(), verdicts

    return run


def test_nodes_have_keys_of_one_job(new_lab, form):
    """Each accepts the other's certificate, and only while the job runs is there a key."""
    lab = new_lab("a", "b")
    program = f"cp -r $MSRUN_RUN_DIR/tls {lab.folder}/$RANK; echo $MSRUN_RUN_DIR"
    nodes = form(lab.hosts, "--data-tls", "--nnodes", 2, *shell(program))

    assert [node.wait(END_SECONDS) for node in nodes] == [0, 0]
    for own, other in ((0, 1), (1, 0)):
        words = ["openssl", "verify", "-x509_strict", "-CAfile", f"{own}/ca.pem"]
        subprocess.run([*words, f"{other}/certificate.pem"], cwd=lab.folder, check=True)
    keys = [(lab.folder / str(rank) / "key.pem").read_text() for rank in (0, 1)]
    assert keys[0] != keys[1]
    for rank, node in enumerate(nodes):
        assert not Path(node.log(rank).splitlines()[0]).exists()


HOSTS = pytest.mark.parametrize("hosts", [("a",), ("a", "b")], ids=["user", "host"])


@HOSTS
@pytest.mark.parametrize("mode", ["silent", "garbage"])
@pytest.mark.few(2)
def test_who_does_not_know_the_protocol_has_no_effect(attacked, hosts, mode):
    """D-01, D-02."""
    codes, logs, _ = attacked(hosts, mode)

    assert codes == [0] * len(hosts)
    assert all("right" in log for log in logs)


@HOSTS
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("place", marks=pytest.mark.slow),
        pytest.param("place-garbage", marks=pytest.mark.slow),
        "place-load",
    ],
)
def test_who_takes_a_ranks_place_ends_the_job_and_runs_nothing(attacked, hosts, mode):
    """D-03, D-04, D-05."""
    codes, logs, verdicts = attacked(hosts, mode)
    check(hosts, codes, logs, verdicts)
    if len(hosts) == 1:  # gloo may have closed what sent garbage
        assert re.search(f"{NAMED}|a stranger had taken its place", verdicts[0]["root"]["error"])


@pytest.mark.few(1)
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_another_user_who_answers_for_rank_0_is_named_and_runs_nothing(attacked, start):
    """D-07: before the first collective, the kernel tells whose each connection is."""
    codes, _, verdicts = attacked(("a",), "answer", 1, OBJECTS, "--start-method", start)

    assert codes == [1]
    assert NAMED in verdicts[0]["root"]["error"]


@HOSTS
@pytest.mark.slow
def test_a_crowd_at_the_data_ports_ends_the_job_at_worst(attacked, hosts):
    """D-06: gloo opens a file for each connection, and ends where there is none left."""
    check(hosts, *attacked(hosts, "place", CROWD))


def check(hosts, codes, logs, verdicts):
    print(codes, [verdict["reason"] for verdict in verdicts])
    for log in logs:
        assert "the sum is wrong" not in log
    if codes == [0] * len(hosts):
        assert all("right" in log for log in logs)
        return
    assert len(set(codes)) == 1
    for verdict in verdicts:
        assert verdict["code"] == codes[0]
        assert re.match(r"rank \d .* (exited with code|was killed by)", verdict["reason"])
