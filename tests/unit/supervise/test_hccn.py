"""Addresses of Ascend devices, from the file or the tool."""

import pytest

from msrun.supervise.hccn import read_device_ips


@pytest.fixture
def root(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hccn.conf").write_text(
        "address_0=192.1.27.6\nnetmask_0=255.255.255.0\n  address_2=2001:db8::2 \naddress_3=$(x)\n"
    )
    return tmp_path


def test_the_file_is_asked_before_the_tool(root):
    asked = []

    def ask(number):
        asked.append(number)
        return {1: "ipaddr:192.2.27.6\nnetmask:255.255.255.0\n", 3: "no such device"}.get(
            number, ""
        )

    found = read_device_ips(root, [0, 1, 2, 3, 4], ask)

    assert found == {0: "192.1.27.6", 1: "192.2.27.6", 2: "2001:db8::2"}
    assert asked == [1, 3, 4]


def test_without_a_file_the_tool_answers(tmp_path):
    assert read_device_ips(tmp_path, [7], lambda number: f"ipaddr:10.0.0.{number}") == {
        7: "10.0.0.7"
    }
