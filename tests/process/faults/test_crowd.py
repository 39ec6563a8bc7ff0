"""As many nodes as a job may have, at once."""

import resource

import pytest

from scripts.bench.rendezvous import form

pytestmark = pytest.mark.process

NODES = 10_000
FILES = NODES + 1_000


@pytest.fixture
def open_files():
    """Let this process and its children open as many files as they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FILES:
        pytest.skip(f"open files are limited to {hard} (ulimit -Hn), {FILES} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("open_files")
def test_ten_thousand_nodes_that_come_at_once_get_their_ranks():
    """Each of them waits until most others are through; nobody may be sent away meanwhile."""
    formed = form(NODES, 0.0, curve=True)

    assert formed.agents == NODES
    assert formed.rss < 600
