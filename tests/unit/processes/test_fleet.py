"""Orders of agents, and what they report."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from launchers.remote import check_versions, find_host, hold, read_versions
from msrun import __version__
from msrun.errors import UsageError
from msrun.fleet import (
    Fleet,
    NodeInstructions,
    Report,
    agent_words,
    make_order,
    order_of_node,
    parse_order,
    parse_report,
    render_order,
    render_report,
)
from msrun.hosts.hostlist import Host
from msrun.supervise.secret import read_secret

FLEET = Fleet(job_id="j", words=("train.py", "-x"), nnodes=2, python="python", cwd="/w")
HOSTS = (Host(name="a", slots=2), Host(name="b", slots=3, devices=(1, 2, 5)))


def test_an_agent_is_told_where_to_meet():
    order = replace(make_order(replace(FLEET, hosts=HOSTS)), master_port=7)

    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "7"]
    words += ["--secret-file", "/s", "--workers-per-node", "3", "--job-id", "j", "train.py", "-x"]
    assert list(agent_words(order, 1, "/s")) == words
    assert list(agent_words(order_of_node(order, 1), 1, "/s")) == words


def test_an_agent_alone_meets_nobody():
    order = make_order(replace(FLEET, nnodes=1))

    assert agent_words(order, 0, "/s") == ("--job-id", "j", "train.py", "-x")


def test_devices_that_were_chosen_are_the_ones_seen():
    order = make_order(replace(FLEET, hosts=HOSTS, env={"A": "1"}))

    assert order_of_node(order, 0).env == {"A": "1"}
    assert order_of_node(order, 1).env == {
        "A": "1",
        "CUDA_VISIBLE_DEVICES": "1,2,5",
        "ASCEND_RT_VISIBLE_DEVICES": "1,2,5",
    }


@pytest.mark.parametrize(
    ("order", "node_rank", "sentence"),
    [
        (make_order(FLEET), 0, "the order does not say which node runs the scheduler"),
        (make_order(replace(FLEET, hosts=HOSTS)), 2, "node_rank 2 is outside 0 to 1"),
    ],
)
def test_an_order_that_lacks_something_is_refused(order, node_rank, sentence):
    with pytest.raises(UsageError) as refusal:
        agent_words(order, node_rank, "/s")

    assert refusal.value.message == sentence


ORDERS = st.builds(
    NodeInstructions,
    words=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    nnodes=st.integers(1, 5),
    cwd=st.text(max_size=5),
    env=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    own=st.just((("a",), ("b",))) | st.just(()),
    hides_code=st.booleans(),
)


@given(ORDERS)
def test_a_rendered_order_is_one_line_and_read_back(order):
    text = render_order(order)

    assert "\n" not in text
    assert parse_order(text) == order


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_an_order_or_refused(data):
    try:
        parse_order(data)
    except UsageError as error:
        assert error.message.startswith("the launcher's order is not understood: ")  # noqa: PT017


@pytest.mark.parametrize(
    "report",
    [
        Report(node=3),
        Report(node=0, code=0),
        Report(node=9, code=3),
        Report(node=-1, code=2, is_last=True, reason="error: node b: größer\n  hint: less"),
    ],
)
def test_a_report_is_a_line(report):
    line = render_report(report)

    assert line.endswith(b"\n")
    assert parse_report(line) == report


@pytest.mark.parametrize("line", [b"", b"output\n", b"\x1emsrun \n", b'\x1emsrun {"node":"x"}\n'])
def test_other_lines_are_output(line):
    assert parse_report(line) is None


# -- on the node -----------------------------------------------------------------------


def test_versions_of_this_node():
    found = read_versions({"msrun": "", "torch": "", "no-such-thing": ""})

    assert found["msrun"] == __version__
    assert found["torch"][0].isdigit()
    assert found["no-such-thing"] == "none"


def test_a_node_with_another_version_is_refused():
    check_versions({"msrun": "1"}, {"msrun": "1"})
    check_versions({}, {})

    with pytest.raises(UsageError) as refusal:
        check_versions({"torch": "2.13.0"}, {"torch": "none"})

    assert refusal.value.message == "torch is none here and 2.13.0 at the launcher"


def test_the_secret_is_in_a_private_file_that_no_directory_has():
    path = Path(hold("ab" * 32))

    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("ab" * 32, 0o600)
    assert read_secret(str(path)) == read_secret(str(path))
    assert path.stat().st_nlink == 0


@pytest.mark.parametrize(
    ("hosts", "guess", "own", "here", "expected"),
    [
        (["n0", "n1"], 0, "n1", [], 1),
        (["n0.cluster", "n1.cluster"], 0, "n1", [], 1),
        (["10.0.0.1", "10.0.0.2"], 0, "n1", ["10.0.0.2"], 1),
        (["10.0.0.1", "10.0.0.2"], 1, "n1", ["10.0.0.1", "10.0.0.2"], 1),
        (["n1.a", "n1.b"], 0, "n1", ["n1.b"], 1),
    ],
)
def test_a_node_knows_which_host_it_is(hosts, guess, own, here, expected):
    assert find_host(hosts, guess, own, here.__contains__) == expected


def test_a_node_that_is_no_host_is_refused():
    with pytest.raises(UsageError) as refusal:
        find_host(["a", "b"], 0, "c", lambda _: False)

    assert refusal.value.message == "it is none of the hosts a, b"
