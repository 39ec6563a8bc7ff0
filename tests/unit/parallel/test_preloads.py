"""What a parent of forked ranks imports for them follows from their configuration."""

import pytest

from msrun.parallel.config import preloads
from msrun.parallel.config_file import parse_config

OURS = ("msrun.parallel.runtime", "msrun.parallel.preload")
PLAN = [{"match": "*", "style": "rowwise"}]


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({}, ()),
        ({"mesh": {"dp": 2}, "accumulate": 2}, ()),
        ({"plan": PLAN}, ("tensor",)),
        ({"optimizer": {"zero": 1}}, ("tensor", "fsdp")),
        ({"pipeline": {"stages": {"a": 0}, "microbatches": 1}}, ("pipelining",)),
        ({"checkpoint": {"dir": "ckpt"}}, ("checkpoint",)),
        (
            {
                "plan": PLAN,
                "optimizer": {"zero": 3},
                "pipeline": {"stages": "auto", "microbatches": 1},
            },
            ("tensor", "fsdp", "pipelining"),
        ),
    ],
)
def test_only_what_is_needed_is_imported(tree, names):
    expected = (*(f"torch.distributed.{name}" for name in names), *OURS)

    assert preloads(parse_config(tree)) == expected
