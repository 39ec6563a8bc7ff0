"""`float8` is refused by one sentence where it has no meaning, and without torchao."""

import sys

import pytest
from ranks import build

import msrun
from msrun.errors import ConfigError, UsageError
from msrun.parallel.config_file import read_config

pytestmark = [pytest.mark.torch, pytest.mark.own_process]

FLOAT8 = {"float8": {"modules": ["layers.*"]}}


def test_without_torchao_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with msrun.init(FLOAT8) as rt, pytest.raises(UsageError) as refused:
        rt.shard(build("transformer"))
    assert refused.value.message.startswith(
        "parallel.float8 is computed by torchao, which cannot be imported: "
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"verify": 1}, "float8: verify compares with one process"),
        ({"precision": "fp16"}, "float8: precision fp16 scales the loss"),
        ({"mode": "auto"}, "float8: mode auto runs operators in the types of the model"),
        ({"mesh": {"ep": 2}}, "float8: was not compared over the axis ep"),
        ({"float8": {"modules": []}}, "float8.modules: is empty"),
    ],
)
def test_configurations_without_a_meaning_are_refused(other, said):
    with pytest.raises(ConfigError) as refused:
        read_config(FLOAT8 | other)
    assert said in refused.value.message
