"""The same servers, workers and coordinators under faults, each time; and others each time."""

import secrets

import pytest
import server_faults

pytestmark = pytest.mark.sim

CHUNK = 30
# CI takes the first of a thousand; all take minutes.
IN_CI = 60
CHUNKS = [
    pytest.param(0),
    *(pytest.param(n, marks=pytest.mark.thorough) for n in range(CHUNK, IN_CI, CHUNK)),
    *(pytest.param(n, marks=pytest.mark.slow) for n in range(IN_CI, 990, CHUNK)),
]


def hold(seeds):
    for seed in seeds:
        promise = server_faults.broken(seed)
        assert promise is None, f"seed {seed}: {promise}"


@pytest.mark.parametrize("start", CHUNKS)
def test_promises_hold_under_faults(start):
    hold(range(start, start + CHUNK))


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", range(3))
def test_promises_hold_under_faults_that_no_run_before_has_seen(chunk):
    base = secrets.randbelow(2**48)
    print(f"chunk {chunk}: seeds {base} to {base + CHUNK - 1}")

    hold(range(base, base + CHUNK))


def test_promises_hold_where_steps_pull_several_times():
    for seed in range(10):
        server_faults.ServerChaos(seed, parts=2).run()


@pytest.mark.parametrize("start", CHUNKS)
def test_promises_hold_where_steps_measure_their_gradients(start):
    """A kill between a measurement and its push changes nothing."""
    for seed in range(start, start + CHUNK):
        odds = {"rounds": 1 + seed % 2, "replicas": seed % 3 // 2}
        promise = server_faults.broken(seed, odds=odds)
        assert promise is None, f"seed {seed}: {promise}"


@pytest.mark.parametrize("start", CHUNKS)
def test_promises_hold_where_workers_wait_for_each_other_within_a_step(start):
    """One that computes sends again what a killed server lacks: others may wait for that."""
    for seed in range(start, start + CHUNK):
        odds = {"together": True, "victims": "server", "scales": 0.0, "replicas": seed % 2}
        promise = server_faults.broken(seed, odds=odds | {"rounds": seed % 3 // 2})
        assert promise is None, f"seed {seed}: {promise}"


COPIES = {"replicas": 1, "victims": "server"}


@pytest.mark.parametrize("start", CHUNKS)
def test_promises_hold_with_copies(start):
    for seed in range(start, start + CHUNK):
        promise = server_faults.broken(seed, odds={"replicas": 1})
        assert promise is None, f"seed {seed}: {promise}"


CALM = {"kills": 0.02, "losses": 0.0, "doubles": 0.0, "delay": 0.05, "scales": 0.0}


@pytest.mark.parametrize("killed", [COPIES, COPIES | {"victims": "servers", "nodes": 2}])
def test_a_killed_server_goes_on_from_copies_and_repeats_no_step(killed):
    """Unless two nodes are killed at once, or the ownership changes."""
    copied = loaded = 0
    for seed in range(60):
        chaos = server_faults.ServerChaos(seed, **CALM, **killed)
        if chaos.rules.replicas and len(chaos.world.servers) > 1:
            chaos.run()
            copied, loaded = copied + chaos.world.copied, loaded + chaos.world.loaded

    assert copied > 10
    assert loaded < copied / 10


SERVERS = {"replicas": 1, "rounds": 2, "victims": "server", "kills": 0.2}


@pytest.mark.parametrize(
    ("seed", "odds"),
    [
        (156008628839552, {}),
        (1091308015, {}),
        (1091307649, {"victims": "node", "kills": 0.1, "scales": 0.05}),
        (1091308025, SERVERS),
    ],
)
def test_a_seed_that_once_broke_a_promise_holds_it(seed, odds):
    assert server_faults.broken(seed, odds=odds) is None


@pytest.mark.parametrize("seed", [4, 17])
def test_a_seed_tells_the_whole_story(seed):
    stories = []
    for _ in range(2):
        chaos = server_faults.ServerChaos(seed)
        chaos.run()
        stories.append((chaos.inputs, chaos.world.outputs))

    assert stories[0] == stories[1]


def test_faults_of_every_kind_happen():
    """A simulation in which nothing goes wrong shows nothing."""
    node = {"kills": 0.3, "victims": "node", "scales": 0.0, "pace": 1.0}
    head = {"kills": 0.3, "victims": "head", "scales": 0.1}
    worlds = []
    for seed, odds in [
        *((seed, node) for seed in (4, 22, 27, 28, 58)),
        (1, head),
        (2, head),
        (3, head),
    ]:
        chaos = server_faults.ServerChaos(seed, **odds)
        chaos.run()
        worlds.append(chaos.world)

    for kind in ("server", "worker", "head"):
        assert sum(world.kills[kind] for world in worlds) > 20
    assert sum(world.rollbacks for world in worlds) > 3
    assert sum(world.decision.ownership.epoch > 2 for world in worlds) > 2
