"""The layer table of docs/architecture.md is what the contracts say."""

from __future__ import annotations

import layer_table
import pytest

CONTRACTS = [
    {
        "type": "layers",
        "containers": ["msrun"],
        "layers": ["cli", "supervise | cluster", "environ : backend"],
    },
    {"type": "forbidden", "source_modules": ["msrun.cli"], "forbidden_modules": ["torch"]},
    {
        "type": "forbidden",
        "source_modules": ["msrun.cluster", "msrun.supervise.affinity"],
        "forbidden_modules": ["os", "time", "torch"],
    },
    {"type": "forbidden", "source_modules": ["msrun.backend"], "forbidden_modules": ["zmq"]},
]


def test_the_table_of_the_page_is_current():
    text = layer_table.PAGE.read_text()

    assert text == layer_table.page(text), "run python scripts/layer_table.py"


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("cli", "yes | |"),
        ("supervise", "`affinity` | `affinity` |"),
        ("cluster", "yes | yes |"),
        ("backend", "| |"),
    ],
)
def test_a_row_promises_what_a_contract_forbids(name, cells):
    [row] = [row for row in layer_table.table(CONTRACTS).splitlines() if f"| `{name}` |" in row]

    assert row.replace("  ", " ").endswith(cells)


def test_neighbours_of_one_layer_are_named():
    text = layer_table.table(CONTRACTS)

    assert "- `supervise` and `cluster` share a layer: they may not import each other." in text
    assert "- `environ` and `backend` share a layer: they may import each other." in text
