"""`--config`: what a job file may say, and what it is told when it says something else."""

import os
from pathlib import Path

import pytest

from msrun.cli.options.job_file import ALIASES_MAX
from msrun.job import BindMode, ProgramKind, WorkerProgram

TRANSCRIPT = Path(__file__).with_name("job_files.txt")

WHOLE = """\
script: train.py
args: [--lr, 1e-3, --flag, yes, 010, 1:30, "a b"]
workers-per-node: 4
nnodes: 1:1
join_timeout: 5m
preload: [numpy, json]
tail: [0, 2-3]
rdzv-conf: {join_timeout: 300}
max-restarts: 2
join: no
bind-core: {device0: ["0-1"], device1: ["2,3"]}
env: {A: on, B: 0x10, C: ""}
job-id: ~
"""


@pytest.fixture
def config(msrun, here):
    """Call `msrun --config job.yaml` with this text in the file."""

    def call(text, words="train.py"):
        content = text if isinstance(text, bytes) else text.encode()
        (here / "job.yaml").write_bytes(content)
        return msrun(f"--config job.yaml {words}")

    return call


def test_a_whole_job(config):
    outcome = config(WHOLE, words="")

    assert outcome.err == ""
    job = outcome.job
    assert job.program == WorkerProgram(
        kind=ProgramKind.SCRIPT,
        target="train.py",
        args=("--lr", "1e-3", "--flag", "yes", "010", "1:30", "a b"),
    )
    assert (job.workers_per_node, job.join_timeout, job.detach) == (4, 300.0, True)
    assert (job.preload, job.tail) == (("numpy", "json"), frozenset({0, 2, 3}))
    assert job.bind_core.by_device == {0: (0, 1), 1: (2, 3)}
    assert job.env == {"A": "on", "B": "0x10", "C": ""}
    assert job.job_id == "train-0a1b2c"


def test_a_module(config):
    program = config("module: pkg\nargs: [x]\n", words="").job.program

    assert program == WorkerProgram(kind=ProgramKind.MODULE, target="pkg", args=("x",))


def test_a_command(config):
    program = config("script: ./prog\nno-python: true\n", words="").job.program

    assert program == WorkerProgram(kind=ProgramKind.COMMAND, target="./prog")


def test_the_command_line_replaces_the_program_and_its_arguments(config):
    program = config("module: pkg\nargs: [x]\n", words="train.py y").job.program

    assert program == WorkerProgram(kind=ProgramKind.SCRIPT, target="train.py", args=("y",))


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "{}\n"])
def test_an_empty_file_says_nothing(config, text):
    assert config(text).code == 0


@pytest.mark.parametrize(("text", "mode"), [("auto", BindMode.AUTO), ("off", BindMode.OFF)])
def test_words_that_yaml_would_take_for_truth_values(config, text, mode):
    assert config(f"bind-core: {text}\n").job.bind_core.mode is mode


def test_an_alias(config):
    assert config("env: {A: &a one, B: *a}\n").job.env == {"A": "one", "B": "one"}


def test_a_file_without_a_size(msrun):
    # As with `--config <(generate)`.
    assert msrun("--config /dev/null train.py").code == 0


def test_the_transcript(config):
    expected = TRANSCRIPT.read_text()
    comment, *blocks = expected.rstrip("\n").split("\n\n")

    actual = [comment + "\n"]
    for block in blocks:
        text = block.partition("\n----\n")[0]
        outcome = config(text)
        assert (outcome.code, outcome.out, outcome.job) == (2, "", None), text
        actual.append(f"{text}\n----\n{outcome.err}")

    if "REWRITE" in os.environ:
        TRANSCRIPT.write_text("\n".join(actual))
    assert "\n".join(actual) == expected


def test_what_is_no_text(config):
    outcome = config(b"role: \xff\n")

    assert outcome.err == "error: --config job.yaml is not UTF-8 text: byte 6 is 0xff\n"


@pytest.mark.parametrize(
    "text",
    [
        "a: [\n",
        "a: b: c\n",
        "%YAML 9\n",
        "*x\n",
        "--- a\n--- b\n",
        "a: \x01\n",
        "\t- x",
        "\x00",
        "\ufeff\ufeff:",
    ],
)
def test_what_is_no_yaml(config, text):
    outcome = config(text)

    assert outcome.err.startswith("error: job.yaml is not YAML: ")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


def test_a_depth_that_no_parser_takes(config):
    outcome = config("a: " + "[" * 50_000)  # libyaml 0.2.6 and newer have a bound of their own

    assert outcome.err.startswith("error: job.yaml")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


def test_both_a_script_and_a_module(config):
    outcome = config("script: train.py\nmodule: pkg\n", words="")

    assert outcome.err == "error: job.yaml: script and module are both given (choose one)\n"


def bomb():
    """Ten levels of ten aliases: 10 billion values in 600 bytes."""
    rows = ["a0: &a0 [x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (bomb(), "job.yaml: a job file has at most 10000 values, aliases included"),
        (
            "a: &a x\nb: [" + ", ".join(["*a"] * (ALIASES_MAX + 1)) + "]\n",
            "job.yaml: a job file has at most 100 aliases and 20 levels",
        ),
        ("a: " + "[" * 500, "job.yaml: a job file has at most 100 aliases and 20 levels"),
        ("#" * (2**20 + 1), "--config job.yaml is larger than 1 MiB"),
    ],
    ids=["bomb", "aliases", "levels", "bytes"],
)
def test_bounds(config, text, sentence):
    assert config(text).err == f"error: {sentence}\n"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("nowhere.yaml", "No such file or directory"), ("pkg", "Is a directory")],
)
def test_what_cannot_be_read(msrun, path, reason):
    outcome = msrun(f"--config {path} train.py")

    assert outcome.err == f"error: --config {path} cannot be read: {reason}\n"
