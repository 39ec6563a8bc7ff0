"""The same 1,000 clusters under faults, each time, and each night 2,000."""

import hashlib

import faults
import mutants
import pytest
import transcript

pytestmark = pytest.mark.sim

CHUNK = 250
CHUNKS = [
    *range(0, 500, CHUNK),
    *(pytest.param(start, marks=pytest.mark.thorough) for start in range(500, 1000, CHUNK)),
    *(pytest.param(start, marks=pytest.mark.slow) for start in range(1000, 2000, CHUNK)),
]


@pytest.mark.parametrize("start", CHUNKS)
def test_promises_hold_under_faults(start):
    rate = faults.hold(range(start, start + CHUNK))

    assert rate >= faults.SEEDS_PER_CPU_SECOND_MIN


def test_promises_hold_for_servers():
    """I13: a parameter server lives once, and never on a node that is lost."""
    assert faults.hold(range(CHUNK), mutants.WITH_SERVERS) > 0


@pytest.mark.parametrize("seed", [1, 26, 65])
def test_a_seed_tells_the_whole_story(seed):
    """I9: what happens follows from the seed alone, and a transcript repeats it."""
    stories = []
    for _ in range(2):
        chaos = faults.Chaos(seed)
        chaos.run()
        stories.append(transcript.render(chaos.world.settings, chaos.inputs))

    first, second = (hashlib.sha256(story.encode()).hexdigest() for story in stories)

    assert first == second
    assert stories[0] == transcript.replay(stories[0])


@pytest.mark.parametrize("seed", [127758725003695])
def test_a_seed_that_once_broke_a_promise_holds_it(seed):
    assert faults.first_broken([seed]) is None
