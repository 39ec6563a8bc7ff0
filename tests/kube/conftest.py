"""Clusters to test against; `tests/lab/kube` says what they are."""

from __future__ import annotations

import contextlib
import os

import hosts
import pytest
from hosts import Lab
from kube.cluster import Cluster, missing_client
from kube.operators import Operators


def _skip_without_client():
    if lacks := missing_client():
        pytest.skip(f"no client of Kubernetes: {lacks}")


def _skip_without_lab():
    lacks = hosts.missing()
    if lacks and any(map(os.environ.get, ("CI", "MSRUN_REQUIRE_LAB"))):
        pytest.fail(f"a lab of hosts is required here, but there is {lacks}", pytrace=False)
    if lacks:
        pytest.skip(f"no lab of hosts: {lacks}")


@pytest.fixture
def new_cluster(tmp_path):
    """Make a cluster whose nodes have what is said; it ends with the test."""
    _skip_without_client()
    _skip_without_lab()
    with contextlib.ExitStack() as stack:

        def start(**nodes):
            lab = stack.enter_context(Lab(tmp_path))
            return stack.enter_context(Cluster(tmp_path, lab, nodes or None))

        yield start


@pytest.fixture
def cluster(new_cluster):
    """A cluster of two nodes, n0 and n1, that runs pods."""
    return new_cluster()


@pytest.fixture
def api(tmp_path):
    """A cluster without nodes: what is made there stays as it was made."""
    _skip_without_client()
    with Cluster(tmp_path) as made:
        yield made


@pytest.fixture
def client(api):
    """The python client of `api`."""
    import kubernetes

    made = kubernetes.config.new_client_from_config(str(api.kubeconfig))
    yield made
    made.rest_client.pool_manager.clear()


@pytest.fixture
def new_operator(cluster, tmp_path):
    """Make the definitions and the account of the operator; at the end nothing was refused."""
    with contextlib.ExitStack() as stack:

        def make():
            operator = Operators(cluster, tmp_path)
            stack.callback(operator.kill)
            return operator

        yield make
    assert cluster.server.access.refused == []
    for log in tmp_path.glob("operator-*.log"):
        assert "Traceback" not in log.read_text()


@pytest.fixture
def operator(new_operator):
    """One operator that runs."""
    made = new_operator()
    made.start()
    return made
