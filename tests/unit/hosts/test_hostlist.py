"""Host lists, hostfiles and filters: what they mean, that they invert, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.hosts.hostlist import (
    HOSTS_MAX,
    Host,
    compress,
    expand,
    parse_hostfile,
    parse_hosts,
    render_host,
    select,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node0", ["node0"]),
        ("node[01-04,7]", ["node01", "node02", "node03", "node04", "node7"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1-2], m3", ["n1", "n2", "m3"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("n[0-1]-ib.cluster", ["n0-ib.cluster", "n1-ib.cluster"]),
        ("10.0.0.[9-10]", ["10.0.0.9", "10.0.0.10"]),
        ("[1-2]", ["1", "2"]),
        ("[2001:db8::7],[fe80::1%eth0]", ["2001:db8::7", "fe80::1%eth0"]),
        ("::1,b", ["::1", "b"]),
        ("b,a,b", ["b", "a", "b"]),
        ("n[5,3,5]", ["n5", "n3", "n5"]),
    ],
)
def test_a_list_stands_for_names_in_its_order(text, names):
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["node01", "node02", "node03", "node7"], "node[01-03,7]"),
        (["n9", "n10", "n09", "n10"], "n[9-10,09-10]"),
        (["n1", "m1", "n2"], "n1,m1,n2"),
        (["n1.dc2", "n2.dc2", "n1.dc3"], "n[1-2].dc2,n1.dc3"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["::1", "a", "1", "2"], "[::1],a,[1-2]"),
        (["n3", "n3"], "n[3,3]"),
    ],
)
def test_names_make_a_short_list(names, text):
    assert compress(names) == text
    assert list(expand(text)) == names if names else True


NAMES = st.one_of(
    st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,6}", fullmatch=True),
    st.builds("{}{:0{}}{}".format, st.sampled_from(["n", "r1n", ""]), st.integers(0, 120),
              st.integers(1, 3), st.sampled_from(["", "-ib", ".dc2", ".c.10"])),
    st.integers(0, 300).map(lambda n: f"10.0.{n // 256}.{n % 256}"),
    st.integers(0, 20).map(lambda n: f"2001:db8::{n:x}"),
    st.just("9" * 40),
)  # fmt: skip


@given(st.lists(NAMES, min_size=1, max_size=40))
def test_a_short_list_stands_for_exactly_its_names(names):
    assert list(expand(compress(names))) == names


def test_a_short_list_of_many_hosts_is_short():
    names = [f"gpu{n:05}" for n in range(HOSTS_MAX)]

    assert compress(names) == f"gpu[00000-{HOSTS_MAX - 1}]"
    assert list(expand(compress(names))) == names


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "host list '' lacks a name at a comma or its end"),
        ("a,,b", "host list 'a,,b' lacks a name at a comma or its end"),
        ("n[1,2", "host list 'n[1,2' has a bracket that is not closed"),
        ("n]1", "host 'n]1' is no host name or address"),
        ("n[1-]", "host 'n[1-]': '1-' is no range such as 01-04 or 7"),
        ("n[]", "host 'n[]': '' is no range such as 01-04 or 7"),
        ("n[x]", "host 'n[x]': 'x' is no range such as 01-04 or 7"),
        ("n[٣]", "host 'n[٣]': '٣' is no range such as 01-04 or 7"),
        ("n[3-1]", "host 'n[3-1]': range 3-1 goes backwards"),
        ("n[1-010]", "host 'n[1-010]': range 1-010 has numbers of unequal width"),
        ("n[0-65536]", "host list with 'n[0-65536]' has more than 65536 hosts"),
        ("n[0-255][0-256]", "host list with 'n[0-255][0-256]' has more than 65536 hosts"),
        ("a,n[1-65536]", "host list with 'n[1-65536]' has more than 65536 hosts"),
        ("n" + "[0]" * 17, f"host 'n{'[0]' * 17}' has more than 16 brackets"),
        ("[a:b]", "host 'a:b' is no IPv6 address"),
        ("[::1%-x]", "host '::1%-x' is no host name or address"),
        ("n[::1]", "host 'n[::1]': an address in brackets stands alone"),
        ("-oProxyCommand=x", "host '-oProxyCommand=x' is no host name or address"),
        ("a;b", "host 'a;b' is no host name or address"),
        ("a b", "host 'a b' is no host name or address"),
        ("a\x1b[2J", r"host list 'a\x1b[2J' has a bracket that is not closed"),
        ("ä", "host 'ä' is no host name or address"),
    ],
)
def test_what_is_no_list_is_refused(text, sentence):
    with pytest.raises(UsageError) as refusal:
        expand(text)

    assert refusal.value.message == sentence


# -- hostfiles -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("node0", [Host(name="node0")]),
        ("node0 slots=8", [Host(name="node0", slots=8)]),
        ("node0 slots=2 max-slots=4", [Host(name="node0", slots=2)]),
        ("node0 max_slots=4 # all of it", [Host(name="node0", slots=4)]),
        ("node0:8", [Host(name="node0", slots=8)]),
        ("node[0-1]:8", [Host(name="node0", slots=8), Host(name="node1", slots=8)]),
        ("node0:4 user=alice", [Host(name="node0", slots=4, user="alice")]),
        ("alice@node0", [Host(name="node0", user="alice")]),
        ("alice@node0:2222 slots=4", [Host(name="node0", user="alice", port=2222, slots=4)]),
        ("10.0.0.1 port=22", [Host(name="10.0.0.1", port=22)]),
        ("::1 slots=2", [Host(name="::1", slots=2)]),
        ("[::1]:2", [Host(name="::1", slots=2)]),
        ("bob@[2001:db8::7]:22", [Host(name="2001:db8::7", user="bob", port=22)]),
        ("bob@2001:db8::7", [Host(name="2001:db8::7", user="bob")]),
        ("node0 SLOTS=3 UserName=bob", [Host(name="node0", slots=3, user="bob")]),
    ],
)
def test_a_line_of_each_kind_of_hostfile(line, hosts):
    assert list(parse_hostfile(line, "hosts")) == hosts


def test_a_hostfile_has_comments_and_empty_lines_and_either_line_end():
    text = "# two nodes\r\n\r\nb slots=1\r\n   a\tslots=2  \n#c\n"

    assert parse_hostfile(text, "hosts") == (Host(name="b", slots=1), Host(name="a", slots=2))


def test_a_node_file_of_pbs_has_a_line_for_each_slot():
    assert parse_hostfile("a\nb\na\na\n", "nodes") == (
        Host(name="a", slots=3),
        Host(name="b"),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "hosts names no host"),
        ("# none\n", "hosts names no host"),
        ("a\nb slots=0", "hosts:2: slots '0' is no number from 1 to 1024"),
        ("a slots=", "hosts:1: slots '' is no number from 1 to 1024"),
        ("a:2222", "hosts:1: slots '2222' is no number from 1 to 1024"),
        ("a slots=8 slots=4", "hosts:1: 'slots=4': slots 8 is already given"),
        ("a:8 slots=8", "hosts:1: 'slots=8': slots 8 is already given"),
        ("a slots=8 max_slots=4", "hosts:1: slots 8 is more than max_slots 4"),
        ("a:", "hosts:1: slots '' is no number from 1 to 1024"),
        ("u@a:0", "hosts:1: port '0' is no number from 1 to 65535"),
        ("u@a:65536", "hosts:1: port '65536' is no number from 1 to 65535"),
        ("-l@a", "hosts:1: user '-l' is no name to log in by"),
        ("@a", "hosts:1: user '' is no name to log in by"),
        (
            "a if=0",
            "hosts:1: 'if=0' is not known of a host (choose slots=, max_slots=, user= or port=)",
        ),
        (
            "a 8",
            "hosts:1: '8' is not known of a host (choose slots=, max_slots=, user= or port=)",
        ),
        ("a slots=2\nb\na slots=2", "hosts:3: host a stands on line 1 already"),
        ("a slots=2\nu@a", "hosts:2: host a stands on line 1 already"),
        ("a\n" * 1025, "hosts:1025: slots '1025' is no number from 1 to 1024"),
        ("n[0-65535]\nm", "hosts:2: there are more than 65536 hosts"),
    ],
)
def test_what_is_no_hostfile_is_refused_with_its_line(text, sentence):
    with pytest.raises(UsageError) as refusal:
        parse_hostfile(text, "hosts")

    assert refusal.value.message == sentence


def test_a_file_beyond_any_size_is_refused():
    with pytest.raises(UsageError, match=r"^hosts has 16777217 characters \(at most 16777216\)$"):
        parse_hostfile("#" * (2**24 + 1), "hosts")
    with pytest.raises(UsageError, match=r"^a host list has 16777217 characters"):
        expand("a" * (2**24 + 1))


HOSTS = st.builds(
    Host,
    name=NAMES,
    slots=st.none() | st.integers(1, 1024),
    user=st.none() | st.sampled_from(["root", "alice.b", "u_1"]),
    port=st.none() | st.integers(1, 65535),
)


@given(st.lists(HOSTS, min_size=1, max_size=20, unique_by=lambda host: host.name))
def test_a_rendered_hostfile_is_read_back(hosts):
    text = "\n".join(map(render_host, hosts))

    assert list(parse_hostfile(text, "hosts")) == hosts


@given(st.text(st.sampled_from("ab01-,[]:@=# .\n%\t\\é"), max_size=40))
def test_any_text_is_a_hostfile_or_refused(text):
    for parse in (expand, parse_hosts, lambda text: parse_hostfile(text, "hosts")):
        try:
            parse(text)
        except UsageError as error:
            assert "\n" not in error.message  # noqa: PT017 - either outcome is right


# -- filters ---------------------------------------------------------------------------

ALL = tuple(Host(name=f"n{i}", slots=4) for i in range(4))


def names(hosts):
    return [(host.name, host.slots, host.devices) for host in hosts]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", [("n0", 4, None), ("n1", 4, None), ("n2", 4, None), ("n3", 4, None)]),
        ("n3,n[0-1]", "", [("n0", 4, None), ("n1", 4, None), ("n3", 4, None)]),
        ("n1@n2:2,0", "", [("n1", 4, None), ("n2", 2, (0, 2))]),
        ("n[1-2]:3", "", [("n1", 1, (3,)), ("n2", 1, (3,))]),
        ("", "n[1-3]", [("n0", 4, None)]),
        ("", "n0:0,1@n[2-3]", [("n0", 2, (2, 3)), ("n1", 4, None)]),
        ("n0:0,1@n1", "n0:0", [("n0", 1, (1,)), ("n1", 4, None)]),
        ("n0:0,1@n1", "n0:0,1", [("n1", 4, None)]),
        (" n0 @ n1 ", "", [("n0", 4, None), ("n1", 4, None)]),
    ],
)
def test_filters_leave_hosts_in_their_own_order(include, exclude, expected):
    assert names(select(ALL, include=include, exclude=exclude)) == expected


def test_a_filter_names_addresses_as_lists_do():
    hosts = (Host(name="::1", slots=2), Host(name="::2"))

    assert names(select(hosts, include="[::1]:1")) == [("::1", 1, (1,))]
    assert names(select(hosts, exclude="::1")) == [("::2", None, None)]


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"include": "n9"}, "--include 'n9': n9 is no host of the job"),
        ({"exclude": "n0@n0:1"}, "--exclude 'n0@n0:1': n0 is given twice"),
        ({"include": "n0:4"}, "--include 'n0:4': device of n0 '4' is no number from 0 to 3"),
        ({"include": "n0:"}, "--include 'n0:': device of n0 '' is no number from 0 to 3"),
        ({"include": "n0:a"}, "--include 'n0:a': device of n0 'a' is no number from 0 to 3"),
        ({"include": "m:0"}, "--include 'm:0': m has no slots= to choose devices from"),
        ({"exclude": "n[0-3],m"}, "--include and --exclude leave no host"),
        ({"include": "n0", "exclude": "n0"}, "--include and --exclude leave no host"),
        ({"include": "n["}, "--include 'n[': host list 'n[' has a bracket that is not closed"),
    ],
)
def test_a_filter_that_fits_no_host_is_refused(filters, sentence):
    with pytest.raises(UsageError) as refusal:
        select((*ALL, Host(name="m")), **filters)

    assert refusal.value.message == sentence
