"""Round trips over generated tables, and mutations that may only end in RankTableError."""

import copy
import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import (
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    TableDevice,
    TableStatus,
    Version,
    check_hccl,
    check_table,
    merge_tables,
    parse_table,
    render_table,
)

JSON = st.recursive(
    st.sampled_from([None, True, 0, -7, 10**30, 0.1, -2.5e-9, "", "a", "\u00e9", "\ud800", "\x00"]),
    lambda children: (
        st.lists(children, max_size=2)
        | st.dictionaries(st.sampled_from(["", "a", "device"]), children, max_size=2)
    ),
    max_leaves=3,
)
# Keys the model does not know, with values as `parse_table` keeps them.
EXTRAS = st.dictionaries(st.sampled_from(["", "x", "numa_id", "\u00fc"]), JSON, max_size=2).map(
    lambda fields: tuple(
        (key, json.dumps(value, sort_keys=True, separators=(",", ":")))
        for key, value in sorted(fields.items())
    )
)
NAMES = st.sampled_from(["a", "node_1", "10.0.0.1", "b" * 64, "\u8282\u70b9", '"quoted"'])
DEVICE_FIELDS = st.sampled_from(
    [
        {},
        {"device_port": 1, "device_logical_id": 0},
        {"device_port": 65535, "backup_device_port": 16667},
        {"device_ip": "", "backup_device_ip": ""},
        {"device_logical_id": 2**32 - 1, "extra": (("numa_id", '""'),)},
    ]
)
SERVER_FIELDS = st.sampled_from(
    [
        {},
        {"host_ip": "10.0.0.1", "host_nic_ip": "reserve"},
        {"pod_ip": "fe80::1%eth0", "container_ip": "::", "server_ip": "127.0.0.1"},
        {"host_ip": "", "hardware_type": "800I-A2-32G", "host_nic_ip": "10.0.0.2"},
        {"hardware_type": ""},
    ]
)


@st.composite
def devices(draw, first_rank, address):
    """The devices of one server, whose addresses start with `address`."""
    ids = draw(st.lists(st.sampled_from([0, 1, 7, 2**32 - 1]), min_size=1, unique=True))
    ranks = draw(st.permutations(range(first_rank, first_rank + len(ids))))
    return tuple(
        TableDevice(
            **{
                "device_id": device_id,
                "rank_id": rank,
                "device_ip": f"{address}.{i},{address}.{i + 50}",
                "super_device_id": rank,
                "backup_device_ip": f"{address}.{i + 100}",
                "host_port": 1 + i,
            }
            | draw(DEVICE_FIELDS)
        )
        for i, (device_id, rank) in enumerate(zip(ids, ranks, strict=True))
    )


@st.composite
def tables(draw):
    """Tables that `check_table` finds sound."""
    server_list = []
    first_rank = 0
    for s, server_id in enumerate(draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))):
        device = draw(devices(first_rank, f"10.0.{s}"))
        first_rank += len(device)
        fields = draw(SERVER_FIELDS)
        server_list.append(Server(server_id=server_id, device=device, extra=draw(EXTRAS), **fields))
    return RankTable(
        version=draw(st.sampled_from(Version)),
        status=draw(st.sampled_from(TableStatus)),
        server_list=tuple(server_list),
        super_pod_list=draw(st.just(()) | super_pods(server_list)),
        extra=draw(EXTRAS),
    )


@st.composite
def super_pods(draw, server_list):
    """Pods of neighbouring servers that hold them all."""
    ids = [server.server_id for server in server_list]
    cuts = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=2)) | {0, len(ids)})
    return tuple(
        SuperPod(super_pod_id=f"pod-{p}", server_list=tuple(ids[start:end]), extra=draw(EXTRAS))
        for p, (start, end) in enumerate(itertools.pairwise(cuts))
    )


def places(value, where=()):
    """Yield the path of every value inside `value`, itself included."""
    yield where
    if isinstance(value, dict):
        for key, child in value.items():
            yield from places(child, (*where, key))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from places(child, (*where, i))


@st.composite
def mutated(draw):
    """JSON values near a sound table: parts replaced, removed, doubled or renamed."""
    root = {"root": json.loads(render_table(draw(tables())))}
    for _ in range(draw(st.integers(1, 4))):
        *parents, last = draw(st.sampled_from(list(places(root))[1:]))
        parent = root
        for key in parents:
            parent = parent[key]
        match draw(st.integers(0, 4)):
            case 0 | 1:
                donor = draw(st.sampled_from(["0", "1", 0, 1, -1, 2**70, "1.2", [], {}]) | JSON)
                parent[last] = donor
            case 2 if last != "root":
                del parent[last]
            case 3 if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[last]))
            case _ if isinstance(parent, dict) and last != "root":
                parent[draw(st.sampled_from(["", "x", "rank_id", "device"]))] = parent.pop(last)
    return root["root"]


def read_or_refuse(text):
    """Parse `text`: a table must be sound and survive, a refusal must have reasons."""
    refusal = None
    try:
        table = parse_table(text)
    except RankTableError as error:
        refusal = error
    if refusal:
        assert refusal.problems
        assert str(refusal).isascii()
        return
    assert check_table(table) == ()
    assert isinstance(check_hccl(table), tuple)
    assert parse_table(render_table(table)) == table


@settings(max_examples=50)
@given(tables())
def test_parse_undoes_render_and_render_is_stable(table):
    text = render_table(table)
    parsed = parse_table(text)

    assert parsed == table
    assert render_table(parsed) == text
    assert text.isascii()


@settings(max_examples=50)
@given(tables(), st.randoms(use_true_random=False))
def test_order_of_keys_and_layout_do_not_matter(table, random):
    def shuffle(value):
        if isinstance(value, list):
            return [shuffle(item) for item in value]
        if not isinstance(value, dict):
            return value
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffle(value[key]) for key in keys}

    text = render_table(table)
    assert render_table(parse_table(json.dumps(shuffle(json.loads(text))))) == text


@settings(max_examples=50)
@given(tables())
def test_merge_of_single_servers_restores_the_table(table):
    parts = [RankTable(version=Version.V1_0, server_list=(server,)) for server in table.server_list]

    assert merge_tables(parts) == RankTable(version=Version.V1_0, server_list=table.server_list)


@given(mutated())
def test_mutated_values_are_read_or_refused(value):
    read_or_refuse(json.dumps(value))


@given(tables(), st.data())
def test_mutated_text_is_read_or_refused(table, data):
    text = render_table(table)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    noise = data.draw(st.text(max_size=5) | st.sampled_from(['"', "{", "]", "\\", "NaN", "1e999"]))
    read_or_refuse(text[:start] + noise + text[end:])


@given(st.binary(max_size=64) | st.text(max_size=64) | JSON.map(json.dumps))
def test_noise_is_read_or_refused(noise):
    read_or_refuse(noise)
