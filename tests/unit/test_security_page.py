"""Every promise of docs/security.md names a test, and the test is there."""

import re
from pathlib import Path

from msrun.cluster.wire.control_messages import AnyRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    found = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }

    assert len(named) > 20
    assert named - found == set()


def test_every_file_that_the_page_names_exists():
    paths = re.findall(r"`(tests/\S+?)`", PAGE)

    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_attack_has_its_row_and_its_test():
    rows = {f"S-{number:02}" for number in range(1, 20)}
    tests = (ROOT / "tests/process/faults/test_attacks.py").read_text()
    tests += (ROOT / "tests/unit/transport/test_sockets.py").read_text()
    tests += (ROOT / "tests/cluster/test_strangers.py").read_text()
    tests += (ROOT / "tests/unit/worker/test_store_wire.py").read_text()

    assert set(re.findall(r"S-\d\d", PAGE)) == rows
    assert rows - set(re.findall(r"S-\d\d", tests)) == set()


def test_every_attack_on_the_data_ports_has_its_row_and_its_test():
    tests = (ROOT / "tests/cluster/test_data_ports.py").read_text()

    assert set(re.findall(r"D-\d\d", PAGE)) == set(re.findall(r"D-\d\d", tests))


def test_every_question_from_outside_is_on_the_page():
    section = PAGE.split("## Control from outside")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)

    assert rows == [request.__name__ for request in AnyRequest.__args__]
