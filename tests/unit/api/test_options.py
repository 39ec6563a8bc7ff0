"""Options by their Python names are those of the command line, and are checked as there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msrun.api.options import PythonOptions
from msrun.cli.options.command_line import read_command_line
from msrun.cli.options.table import TABLE
from msrun.errors import UsageError


def words(**given):
    return PythonOptions(given, has_function=True).words


def refusal(**given):
    with pytest.raises(UsageError) as refused:
        PythonOptions(given, has_function=True)
    return refused.value.message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_restarts": 3}, ["--max-restarts=3"]),
        ({"workers": "auto"}, ["--workers-per-node=auto"]),
        ({"nproc_per_node": 2}, ["--nproc-per-node=2"]),
        ({"grace": 1.5, "lease": None}, ["--grace=1.5"]),
        ({"log_dir": Path("a/b")}, ["--log-dir=a/b"]),
        ({"insecure": True}, ["--insecure=true"]),
        ({"env": {"A": "1", "B": 2}}, ["--env=A=1", "--env=B=2"]),
        ({"tail": [0, 2]}, ["--tail=0,2"]),
        ({"tail": range(2)}, ["--tail=0,1"]),
        ({"preload": ("numpy", "json")}, ["--preload=numpy,json"]),
        ({"rdzv_conf": {"join_timeout": 5}}, ["--rdzv-conf=join_timeout=5"]),
        ({"log_dir": ""}, ["--log-dir="]),
    ],
)
def test_a_value_has_the_forms_of_a_job_file(given, expected):
    assert words(**given) == expected


def test_a_mapping_is_handed_on_as_it_is_in_a_job_file():
    [word] = words(parallel={"mesh": {"dp": -1}, "seed": 3})

    flag, _, text = word.partition("=")
    assert (flag, json.loads(text)) == ("--parallel", {"mesh": {"dp": "-1"}, "seed": "3"})


@pytest.mark.parametrize("option", TABLE, ids=lambda option: option.name)
def test_every_option_of_the_command_line_has_its_name(option):
    names = [s[2:].replace("-", "_") for s in option.spellings if s.startswith("--")]

    for name in names:
        with pytest.raises(UsageError, match=rf"\A{name}[=:\[ ]"):
            PythonOptions({name: b""}, has_function=True)


def test_the_words_are_what_the_command_line_reads():
    given = words(max_restarts=3, env={"A": "x y"}, tail=[0, 1])

    line = read_command_line("msrun", "", TABLE, [*given, "train.py"])

    texts = {option.name: texts for option, texts in line.texts.items()}
    assert texts == {"max-restarts": ("3",), "env": ("A=x y",), "tail": ("0,1",)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_restart": 3}, "there is no option max_restart; did you mean max_restarts?"),
        ({"num_processes": 2}, "there is no option num_processes"),
        ({"max_restarts": -1}, "max_restarts='-1' is out of range (choose a whole number from 0)"),
        ({"max_restarts": True}, "max_restarts='true' is not a whole number (choose"),
        ({"max_restarts": [1]}, "max_restarts: '[\"1\"]' is not text or a number"),
        ({"grace": object}, "grace=\"<class 'object'>\" is of type type, not text, a number or"),
        ({"job_id": "a\0b"}, "job_id holds a NUL, which no argument or variable can"),
        ({"workers": 2, "nproc_per_node": 2}, "nproc_per_node is the same option as workers"),
        ({"module": True}, "module=true is for scripts, and the workers call a function"),
        ({"join": False}, "join=false: a job of this program ends with it"),
        ({"sim_level": 1}, "sim_level=1 is refused: msrun simulates no cluster"),
        ({"parallel": {"mesh": {"dp": "x"}}}, "parallel="),
    ],
)
def test_a_wrong_option_is_one_sentence(given, message):
    sentence = refusal(**given)

    assert sentence.startswith(message)
    assert "\n" not in sentence


def test_messages_of_the_command_line_are_shown_in_python():
    options = PythonOptions({"workers": 3, "max_restarts": 1}, has_function=False)

    sentence = "--workers-per-node 3 is more than --max-restarts, --max-restarts-x"
    assert options.in_python(sentence) == "workers=3 is more than max_restarts, --max-restarts-x"
