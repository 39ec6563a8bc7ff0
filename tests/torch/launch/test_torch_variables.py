"""Variables that torch reads once are followed later, by names of torch that are not public."""

import logging

import pytest
import torch

from msrun.parallel.torch_compat import follow_jit_variable, follow_log_variables

pytestmark = pytest.mark.torch


def test_logs_follow_their_variable(monkeypatch):
    levels = []
    for setting in ("+dynamo", None):
        monkeypatch.setenv("TORCH_LOGS", setting) if setting else monkeypatch.delenv("TORCH_LOGS")
        follow_log_variables()
        levels.append(logging.getLogger("torch._dynamo").level)

    assert levels == [logging.DEBUG, logging.NOTSET]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_follows_its_variable(monkeypatch):
    kinds = []
    for setting in ("0", "1"):
        monkeypatch.setenv("PYTORCH_JIT", setting)
        follow_jit_variable()
        kinds.append(isinstance(torch.jit.script(torch.nn.Identity()), torch.jit.ScriptModule))

    assert kinds == [False, True]
