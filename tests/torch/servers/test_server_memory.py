"""Tensors that ranks and servers of one node share: what is shared, and what is left of it."""

import gc
import os
import re
import resource
import threading
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from test_server_kills import kill_at
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import MsrunError
from msrun.parallel.servers.shared_memory import PeerRegion, SharedRegion, peer_region
from msrun.parallel.servers.wire import NOT_HERE, RANK, SERVER, Hail, Packet, decode, encode

pytestmark = pytest.mark.torch

MIB = 1 << 20
STEPS = 6
PACKET = Packet(session="0-0-s", sender=(RANK, 0), target=(SERVER, 0), word=Hail())


def test_a_tensor_of_a_region_is_read_in_place_by_whoever_has_the_region():
    region = SharedRegion(8 * MIB)
    sent = region.empty((64, 128), torch.float32).normal_()
    peer = PeerRegion(region.offer)

    parts = encode(PACKET, {"a": [sent, torch.arange(3)]}, region)
    _, payload = decode(parts, {(RANK, 0): peer})

    assert len(parts) == 2  # the head, and the small tensor
    assert torch.equal(payload["a"][0], sent)
    sent.fill_(7.0)
    assert torch.equal(payload["a"][0], sent)
    payload["a"][0].zero_()  # whatever a reader does, the owner's bytes stay
    assert sent.eq(7.0).all()


def test_a_message_of_shared_memory_that_is_not_here_is_no_tensor():
    region = SharedRegion(MIB)
    parts = encode(PACKET, {"a": region.empty((8192,), torch.float32)}, region)

    assert decode(parts)[1] is NOT_HERE


def test_memory_is_used_again_once_no_view_of_it_is_left():
    region = SharedRegion(8 * MIB)
    first = region.empty((MIB // 4,), torch.float32)
    place, view = region.place(first), first[: MIB // 8].view(2, -1)
    del first
    second = region.empty((MIB // 4,), torch.float32)
    assert region.place(second) != place
    del view, second
    gc.collect()

    whole = region.empty((5 * MIB,), torch.uint8)

    assert region.place(whole) is not None
    assert region.place(region.empty((5 * MIB,), torch.uint8)) is None  # no room: its own memory


@pytest.mark.parametrize("word", ["size", "token", "descriptor"])
def test_a_false_offer_gives_no_region(word, tmp_path):
    region = SharedRegion(MIB)
    other = (tmp_path / "file").open("wb")
    other.truncate(region.offer.size)
    wrong = {"size": 2 * region.offer.size, "token": "00" * 32, "descriptor": other.fileno()}
    from msgspec.structs import replace

    assert peer_region(region.offer) is not None
    assert peer_region(replace(region.offer, **{word: wrong[word]})) is None
    other.close()


def _own(connection):
    region = SharedRegion(MIB)
    region.empty((8192,), torch.float32).fill_(3.0)
    connection.send(region.offer)
    connection.recv()


def test_a_region_outlives_its_owner_for_those_who_have_it_and_nobody_else():
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_own, args=(theirs,))
    process.start()
    offer = ours.recv()
    peer = PeerRegion(offer)
    process.kill()
    process.join()

    assert peer.tensor(4096, (8192,), torch.float32).eq(3.0).all()
    assert peer_region(offer) is None


class Wide(nn.Module):
    """Tensors that are large enough to be shared: a table and a layer."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(2000, 128)
        self.out = nn.Linear(128, 64)

    def forward(self, items):
        return self.out(torch.tanh(self.items(items)))


def build():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Wide()


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, 2000, (512,), generator=draw), torch.rand(512, 64, generator=draw)


def single():
    model, losses = build(), []
    update = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        items, target = batch(step)
        update.zero_grad()
        loss = functional.mse_loss(model(items), target)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(config, folder, stops):
    servers = {"params": ["*"], "snapshot": {"every": 2}, **config}
    rt = msrun.init({"servers": servers})
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    losses = []
    for step in range(STEPS):
        mine = [each.chunk(rt.world_size)[rt.rank] for each in batch(step)]
        losses.append(rt.step(model, update, functional.mse_loss, *mine).item())
        if step in stops:
            (folder / f"at-{step}-{rt.rank}").touch()
            while not (folder / f"on-{step}").exists():
                os.sched_yield()
    regions = _mapped()
    weights = rt.state_dict(model)
    rt.close()
    return losses, weights, regions


def _mapped():
    """Return how many regions this process has mapped, its own among them."""
    return Path("/proc/self/maps").read_text().count("memfd:msrun-servers")


def check(found, regions):
    losses, weights = single()
    for own, state, mapped in found:
        assert own == pytest.approx(losses, abs=1e-6)
        assert mapped == regions
        for name, weight in weights.items() if state else ():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-6)


def test_shared_tensors_train_as_one_process_does_and_survive_a_killed_server(
    tmp_path, monkeypatch
):
    stops = {3: 1}
    with serving(tmp_path, monkeypatch, 2, 2) as job:
        killer = threading.Thread(target=kill_at, args=(job, tmp_path, stops, 2), daemon=True)
        killer.start()
        found = run_warm(train, 2, {}, tmp_path, list(stops))

    check(found, 3)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_tensors_in_frames_train_as_shared_ones(servers, shared, tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, servers, 2):
        found = run_warm(train, 2, {"shared_memory": shared}, tmp_path, [])

    check(found, servers + 1 if shared else 0)


def pull_more_than_there_is_memory():
    """Return what a rank says whose memory does not suffice for the rows that it looks up."""
    rt = msrun.init({"servers": {"params": ["weight"], "shared_memory": False}})
    model = rt.shard(nn.Embedding(16, MIB))
    rt.optimizer(torch.optim.SGD(model.parameters()))
    model(torch.tensor([0]))
    _, hard = before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (fields_of("self")["VmData"] + 32 * MIB, hard))
    try:
        model(torch.arange(16))
    except MsrunError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return ""


def test_a_rank_without_memory_for_its_rows_says_so(tmp_path, monkeypatch):
    """ZeroMQ ends its connection without a word, and for good."""
    with serving(tmp_path, monkeypatch, 1, 1):
        [said] = run_warm(pull_more_than_there_is_memory, 1)

    assert said == "rank 0 has no memory for what parameter server 0 sends"


def push_more_than_a_server_has_memory(pid):
    """Return what a rank says whose server has no memory for the gradient that it sends."""
    rt = msrun.init({"servers": {"params": ["weight"], "shared_memory": False}})
    model = rt.shard(nn.Linear(MIB, 16, bias=False))
    update = rt.optimizer(torch.optim.SGD(model.parameters()))
    loss = model(torch.ones(1, MIB)).sum()
    loss.backward()
    _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (fields_of(pid)["VmData"] + 16 * MIB, hard))
    try:
        update.step()
    except MsrunError as error:
        return f"{error} {error.hint}"
    return ""


def test_a_server_without_memory_for_gradients_is_named_by_the_rank_that_sends_them(
    tmp_path, monkeypatch
):
    """ZeroMQ ends a connection of the server without a word, and makes it anew each time."""
    with serving(tmp_path, monkeypatch, 1, 1) as job:
        [said] = run_warm(push_more_than_a_server_has_memory, 1, job.processes[0].pid)

    assert re.match(r"parameter server 0 takes no message of 6\d{7} bytes", said)
    assert "each time that rank 0 sends it" in said
    assert "--server-num" in said


def fields_of(pid):
    """Return what the kernel says of a process, in bytes where it is in kB."""
    text = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return {name: int(words.split()[0]) << 10 for name, words in fields.items() if "kB" in words}


def resident(pid):
    """Return the bytes of memory of a process that no file backs."""
    fields = fields_of(pid)
    return fields["RssAnon"] + fields["RssShmem"]


def train_a_table(pid, rows, width, kind):
    """Return how much a server grows by a table and its state, after some steps."""
    config = {"params": ["weight"], "snapshot": {"every": 3}}
    rt = msrun.init({"servers": config})
    model = rt.shard(nn.Embedding(rows, width, sparse=kind == "SparseAdam"))
    before = resident(pid)
    update = rt.optimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.01))
    for _ in range(4):
        update.zero_grad()
        model(torch.randint(0, rows, (256,))).sum().backward()
        update.step()
    model(torch.arange(3))
    grown = resident(pid) - before
    rt.close()
    return grown


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "copies"), [("SparseAdam", 3), ("AdamW", 3), ("Adagrad", 2)])
def test_a_server_needs_a_tenth_more_than_table_and_state(kind, copies, tmp_path, monkeypatch):
    rows, width = 800_000, 32
    with serving(tmp_path, monkeypatch, 1, 1) as job:
        [grown] = run_warm(train_a_table, 1, job.processes[0].pid, rows, width, kind, timeout=200)

    assert copies * rows * width * 4 * 0.95 < grown < copies * rows * width * 4 * 1.1
