"""Every option of the installed torchrun, and each way argparse lets one write it."""

from __future__ import annotations

import argparse

import pytest

from msrun.cli.options.command_line import read_command_line
from msrun.cli.options.table import TABLE
from msrun.errors import UsageError

run = pytest.importorskip("torch.distributed.run")
pytestmark = pytest.mark.torch

ACTIONS = [a for a in run.get_args_parser()._actions if a.option_strings and a.dest != "help"]
SPELLINGS = {spelling: action for action in ACTIONS for spelling in action.option_strings}


def beginnings():
    """Yield what argparse takes for an option: each beginning of one, and of no other."""
    for spelling, action in SPELLINGS.items():
        if not spelling.startswith("--"):
            yield spelling, action
            continue
        for end in range(3, len(spelling) + 1):
            word = spelling[:end]
            meant = {id(a) for s, a in SPELLINGS.items() if s.startswith(word)}
            if len(meant) == 1 or word in SPELLINGS:
                yield word, action


def read(word, action):
    takes_value = not isinstance(action, argparse._StoreTrueAction) and action.nargs != 0
    words = [word, "1"] if takes_value else [word]
    return read_command_line("run", "", TABLE, [*words, "train.py", "--lr", "1"])


def test_all_options_are_known():
    assert {a.dest for a in ACTIONS} == {o.torchrun for o in TABLE if o.torchrun}


def test_every_beginning_means_the_same():
    wrong = []
    found = dict(beginnings())
    for word, action in found.items():
        try:
            line = read(word, action)
        except UsageError as error:
            wrong.append((word, error.message))
            continue
        meant = {option.torchrun for option in line.texts}
        if meant != {action.dest} or line.program != ("train.py", "--lr", "1"):
            wrong.append((word, meant, line.program))

    assert len(found) > 300
    assert wrong == []


def test_the_help_says_what_each_option_does():
    vague = ("no effect", "ignored", "accepted for")
    helps = {option.flag: option.help.lower() for option in TABLE if option.torchrun}

    assert [flag for flag, text in helps.items() if any(word in text for word in vague)] == []
