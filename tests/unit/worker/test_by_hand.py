"""Which device a process that was started by hand asks for."""

import pytest

from msrun.cli import by_hand
from msrun.errors import UsageError


@pytest.mark.parametrize("text", ["8", "x", "-1"])
def test_a_device_that_is_not_there_is_refused(text):
    with pytest.raises(UsageError) as refusal:
        by_hand._device({"DEVICE_ID": text}, 8)

    sentence = f"environment DEVICE_ID={text} is no device of this machine (choose 0 to 7)"
    assert refusal.value.message == sentence


def test_a_device_counts_where_there_are_devices():
    given = {"DEVICE_ID": "3"}

    assert [by_hand._device(given, 8), by_hand._device(given, 0), by_hand._device({}, 8)] == [
        3,
        None,
        None,
    ]
