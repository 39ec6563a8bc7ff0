"""`scripts/hccl_tools.py` and `scripts/merge_hccl.py` with the words that MindSpore's take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Answers for eight devices, and complains of others as the real one does.
HCCN_TOOL = """#!/bin/sh
[ "$1 $3 $4" = "-i -ip -g" ] && [ "$2" -lt 8 ] || exit 1
echo "ipaddr:192.$(($2 % 4 + 1)).27.$((6 + $2 / 4))"
echo "netmask:255.255.255.0"
"""


@pytest.fixture
def call(tmp_path):
    tool = tmp_path / "bin" / "hccn_tool"
    tool.parent.mkdir()
    tool.write_text(HCCN_TOOL)
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"

    def run(script, *words):
        return subprocess.run(
            [sys.executable, "-P", SCRIPTS / script, *words],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_the_file_of_the_original(call, tmp_path):
    done = call("hccl_tools.py", "--device_num", "[0,8)", "--server_ip", "10.155.111.140")

    name = "hccl_8p_01234567_10.155.111.140.json"
    golden = Path(__file__).parents[1] / "unit/ranktable/data/v1_0_single_server.json"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/{name}\n", "")
    assert (tmp_path / name).read_text() == golden.read_text()


def test_visible_devices(call, tmp_path):
    words = ("--device_num=[1,3)", "--visible_devices", "4, 5,6,7", "--server_ip=10.0.0.1")
    done = call("hccl_tools.py", *words)

    table = json.loads((tmp_path / "hccl_2p_56_10.0.0.1.json").read_text())
    assert done.returncode == 0
    assert table["server_list"][0]["device"] == [
        {"device_id": "5", "device_ip": "192.2.27.7", "rank_id": "0"},
        {"device_id": "6", "device_ip": "192.3.27.7", "rank_id": "1"},
    ]


def test_merged_tables_number_their_ranks_anew(call, tmp_path):
    for i, devices in enumerate(("[0,4)", "[4,8)")):
        call("hccl_tools.py", "--device_num", devices, "--server_ip", f"10.0.0.{i}")
    files = [f"hccl_4p_{d}_10.0.0.{i}.json" for i, d in enumerate(("0123", "4567"))]
    done = call("merge_hccl.py", *reversed(files))

    table = json.loads((tmp_path / "hccl_2s_8p.json").read_text())
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/hccl_2s_8p.json\n")
    assert table["server_count"] == "2"
    assert [s["server_id"] for s in table["server_list"]] == ["10.0.0.1", "10.0.0.0"]
    ranks = [d["rank_id"] for s in table["server_list"] for d in s["device"]]
    assert ranks == [str(rank) for rank in range(8)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device_num=[0,0)"], "--device_num '[0,0)' is no range such as [0,8)"),
        (["--device_num=8"], "--device_num '8' is no range such as [0,8)"),
        (["--visible_devices=a"], "--visible_devices 'a' is no list such as 4,5,6,7"),
        (
            ["--visible_devices=4,5"],
            "--visible_devices has 2 devices, and --device_num [0,8) needs 8",
        ),
        (
            ["--device_num=[0,9)", "--server_ip=10.0.0.1"],
            "neither hccn_tool nor /etc/hccn.conf has an address of device 8",
        ),
    ],
)
def test_what_the_tools_refuse(call, words, sentence):
    done = call("hccl_tools.py", *words)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == f"error: {sentence}"


def test_tables_that_do_not_fit_together(call):
    call("hccl_tools.py", "--device_num=[0,4)", "--server_ip=10.0.0.1")
    name = "hccl_4p_0123_10.0.0.1.json"
    done = call("merge_hccl.py", name, name)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: the tables do not fit together: server_list[1].server_id: "
        '"10.0.0.1" is already used by server_list[0]'
    )
    assert call("merge_hccl.py", "none.json").stderr == (
        "error: rank table none.json cannot be read: No such file or directory\n"
    )
