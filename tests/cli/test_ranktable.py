"""`msrun ranktable`: whole outputs, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from msrun.topology import DeviceKind

DATA = Path(__file__).parents[1] / "unit" / "ranktable" / "data"

TWO_NODES = """\
{
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {
            "server_id": "10.0.0.1",
            "host_ip": "10.0.0.1",
            "device": [
                {
                    "device_id": "0",
                    "rank_id": "0"
                },
                {
                    "device_id": "1",
                    "rank_id": "1"
                }
            ]
        },
        {
            "server_id": "node7",
            "device": [
                {
                    "device_id": "0",
                    "rank_id": "2"
                }
            ]
        }
    ],
    "status": "completed"
}
"""


@pytest.fixture
def files(here):
    """Copies of the worked examples in the working directory."""
    for path in DATA.iterdir():
        shutil.copy(path, here)
    (here / "hosts").write_text("10.0.0.1 slots=2\nnode7:1\n")
    return here


def servers(outcome):
    table = json.loads(outcome.out)
    return [
        (server["server_id"], [(d["device_id"], d.get("device_ip")) for d in server["device"]])
        for server in table["server_list"]
    ]


# -- build -----------------------------------------------------------------------------


@pytest.mark.usefixtures("files")
def test_a_hostfile_becomes_a_table(msrun):
    assert msrun("ranktable build --hostfile hosts").out == TWO_NODES


def test_a_table_is_written_to_a_file(msrun, files):
    outcome = msrun("ranktable build --hostfile hosts -o t.json")

    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == "t.json: 3 ranks on 2 servers, version 1.0\n"
    assert (files / "t.json").read_text() == TWO_NODES
    assert (files / "t.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.usefixtures("files")
def test_filters_choose_hosts_and_devices(msrun):
    outcome = msrun("ranktable build --hostfile hosts --include 10.0.0.1:1")

    assert servers(outcome) == [("10.0.0.1", [("1", None)])]


def test_devices_of_this_node(msrun, gpus, system):
    system.machine = replace(system.machine, address="10.0.0.5")
    gpus(4)

    assert servers(msrun("ranktable build")) == [("10.0.0.5", [(str(i), None) for i in range(4)])]
    assert servers(msrun("ranktable build --devices 3,1 --server-id n0")) == [
        ("n0", [("3", None), ("1", None)])
    ]


def test_ascend_devices_have_addresses(msrun, gpus, system):
    gpus(2, DeviceKind.NPU)
    system.addresses = {0: "192.1.27.6", 1: "192.2.27.6"}

    outcome = msrun("ranktable build --server-ip 10.0.0.5")

    assert servers(outcome) == [("10.0.0.5", [("0", "192.1.27.6"), ("1", "192.2.27.6")])]
    assert json.loads(outcome.out)["server_list"][0]["host_ip"] == "10.0.0.5"


def test_a_node_without_devices_has_slots(msrun):
    outcome = msrun("ranktable build --slots 2")

    assert servers(outcome) == [("10.0.0.1", [("0", None), ("1", None)])]


def test_an_allocation_of_slurm(msrun):
    slurm = {"SLURM_JOB_NODELIST": "gpu[08-09]", "SLURM_GPUS_ON_NODE": "2"}

    outcome = msrun("ranktable build --slurm", **slurm)
    fewer = msrun("ranktable build --slurm --slots 1 --exclude gpu08", **slurm)

    assert servers(outcome) == [(f"gpu{n}", [("0", None), ("1", None)]) for n in ("08", "09")]
    assert servers(fewer) == [("gpu09", [("0", None)])]


# -- check and show --------------------------------------------------------------------


@pytest.mark.usefixtures("files")
def test_sound_tables(msrun):
    outcome = msrun("ranktable check --hccl v1_0_multi_server.json v1_2_super_pod.json")

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "v1_0_multi_server.json: sound, 8 ranks on 2 servers, version 1.0\n"
        "v1_2_super_pod.json: sound, 12 ranks on 3 servers, version 1.2\n"
    )


@pytest.fixture
def bad(files):
    table = json.loads(TWO_NODES)
    table["server_list"][1]["device"][0]["rank_id"] = "1"
    table["server_list"][0]["device"][1]["device_id"] = 0
    (files / "bad.json").write_text(json.dumps(table))


@pytest.mark.usefixtures("bad")
def test_everything_wrong_with_a_table(msrun):
    outcome = msrun("ranktable check bad.json")

    assert outcome.code == 2
    assert outcome.out == (
        "bad.json: server_list[0].device[1].device_id: "
        "0 is already used by server_list[0].device[0]\n"
        "bad.json: server_list[1].device[0].rank_id: "
        "1 is already used by server_list[0].device[1]\n"
    )


@pytest.mark.usefixtures("files")
def test_what_hccl_needs(msrun):
    msrun("ranktable build --hostfile hosts -o t.json")

    assert msrun("ranktable check t.json").code == 0
    assert msrun("ranktable check --hccl t.json").out == (
        "t.json: server_list[1].device[0].device_ip: "
        "is missing: with 2 servers HCCL needs it, or the server's host_ip\n"
    )


@pytest.mark.usefixtures("bad")
def test_findings_for_programs(msrun):
    outcome = msrun("ranktable check --json bad.json v1_0_single_server.json")

    found = json.loads(outcome.out)
    assert outcome.code == 2
    assert [(f["file"], f["about"], len(f["problems"])) for f in found] == [
        ("bad.json", "", 2),
        ("v1_0_single_server.json", "8 ranks on 1 server, version 1.0", 0),
    ]
    assert found[0]["problems"][0] == {
        "path": "server_list[0].device[1].device_id",
        "message": "0 is already used by server_list[0].device[0]",
    }


@pytest.mark.usefixtures("files")
def test_which_rank_is_where(msrun):
    msrun("ranktable build --hostfile hosts -o t.json")

    assert msrun("ranktable show t.json").out == (
        "t.json, 3 ranks on 2 servers, version 1.0:\n"
        "  rank  server    local rank  device  host ip\n"
        "  0     10.0.0.1  0           0       10.0.0.1\n"
        "  1     10.0.0.1  1           1       10.0.0.1\n"
        "  2     node7     0           0       -\n"
    )


@pytest.mark.usefixtures("files")
def test_which_rank_is_where_for_programs(msrun):
    shown = json.loads(msrun("ranktable show --json v1_2_super_pod.json").out)

    assert shown["version"] == "1.2"
    assert shown["ranks"][11] == {
        "rank": 11,
        "server": "node-2",
        "local_rank": 3,
        "device": 3,
        "device_ip": "172.16.2.4",
        "host_ip": "10.0.0.3",
        "super_pod": "pod-1",
    }


# -- merge and convert -----------------------------------------------------------------


@pytest.mark.usefixtures("files")
def test_merged_tables_have_the_ranks_of_all(msrun):
    one = "v1_0_single_server.json v1_0_multi_server.json"
    (Path("other.json")).write_text(
        Path("v1_0_multi_server.json").read_text().replace("192.", "191.").replace("155.", "156.")
    )

    outcome = msrun("ranktable merge v1_0_multi_server.json other.json -o all.json")
    clash = msrun(f"ranktable merge {one}")

    assert outcome.err == "all.json: 16 ranks on 4 servers, version 1.0\n"
    assert msrun("ranktable check all.json").code == 0
    assert clash.code == 2
    assert clash.err.startswith("error: the tables do not fit together: server_list[1].server_id: ")


@pytest.mark.usefixtures("files")
def test_tables_of_two_versions_do_not_merge(msrun):
    outcome = msrun("ranktable merge v1_0_single_server.json v1_2_super_pod.json")

    assert outcome.err == (
        "error: the tables do not fit together: "
        'v1_2_super_pod.json.version: "1.2" differs from "1.0" of v1_0_single_server.json\n'
    )


@pytest.mark.usefixtures("files")
def test_a_table_in_the_other_version(msrun):
    back = msrun("ranktable convert --to 1.0 v1_2_super_pod.json").out
    forth = msrun("ranktable convert --to 1.2 v1_0_multi_server.json").out
    same = msrun("ranktable convert --to 1.2 v1_2_super_pod.json").out

    assert "super" not in back
    assert json.loads(back)["version"] == "1.0"
    assert forth == Path("v1_0_multi_server.json").read_text().replace('"1.0"', '"1.2"')
    assert same == Path("v1_2_super_pod.json").read_text()


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("mend", "msrun ranktable has no verb 'mend' (choose build, check, show, merge, convert)"),
        ("check", "missing argument 'FILE...'"),
        ("show --xml t", "there is no option --xml"),
        ("show none", "rank table none cannot be read: No such file or directory"),
        ("show .", "rank table . cannot be read: Is a directory"),
        ("show hosts", "hosts: the file is not JSON: line 1 column 5: Extra data"),
        ("build --hostfile none", "hostfile none cannot be read: No such file or directory"),
        ("build --hostfile hosts --slurm", "--hostfile contradicts --slurm (choose one)"),
        ("build --hostfile hosts -o no/t", "no/t cannot be written: No such file or directory"),
        ("build --hostfile plain", "plain: a has no slots="),
        ("build --include a", "--include needs --hostfile or --slurm, whose hosts it chooses"),
        (
            "build --hostfile hosts --devices 0",
            "--devices is for the table of this node alone",
        ),
        ("build --devices 1", "--devices: this node has no device 1 (choose from 0)"),
        ("build --devices 0-", "--devices '0-' is no list of numbers such as 0-3,6"),
        ("build --devices 0-99999", "--devices '0-99999' is no list of numbers such as 0-3,6"),
        ("build --slots 0", "invalid value for '--slots': 0 is not in the range 1<=x<=1024"),
        ("build --devices 0,0", (
            "the table would be unsound: server_list[0].device[1].device_id: "
            "0 is already used by server_list[0].device[0]"
        )),
        (
            "build --slurm",
            "environment SLURM_JOB_NODELIST is not set: this is no allocation of Slurm",
        ),
        ("convert --to 1.0 --super-pod p v1_2_super_pod.json", (
            'v1_2_super_pod.json: super_pod_list: "p" is asked for, '
            'and version "1.0" has no super pods'
        )),
        ("convert --to 1.2 --super-pod p v1_0_single_server.json", (
            "v1_0_single_server.json: server_list[0].device[0].super_device_id: "
            "is missing: the server is in a super pod"
        )),
        (
            "convert --to 1.4 v1_2_super_pod.json",
            "invalid value for '--to': '1.4' is not one of '1.0', '1.2'",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(msrun, files, words, sentence):
    (files / "plain").write_text("a\n")

    outcome = msrun(f"ranktable {words}")

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[0] == f"error: {sentence}"


def test_slots_of_a_node_with_devices_are_refused(msrun, gpus):
    gpus(2)

    outcome = msrun("ranktable build --slots 2")

    assert outcome.err == "error: --slots 2 is for nodes without devices; use --devices\n"


def test_help_of_the_verbs(msrun):
    usage = msrun("ranktable --help")

    assert usage.code == 0
    assert usage.err == (
        "Usage: msrun ranktable VERB [OPTIONS] [FILE]...\n\n"
        "  build     Write the table of this node, of the nodes of a hostfile or of Slurm, or of a "
        "running job.\n"
        "  check     Report every problem of the tables and where it is.\n"
        "  show      Show the server and the device of each rank.\n"
        "  merge     Write one table with the servers of several, in their order, ranks from 0.\n"
        "  convert   Write a table in another version.\n"
    )
    assert msrun("ranktable").code == 2
    assert msrun("ranktable build --help").code == 0
