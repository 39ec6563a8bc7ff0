"""What nobody planned in the files of a user: a job file, and one for `--parallel`.

Each is read, or refused with one sentence.
"""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.cli.options.job_file import JobFile, parse_job_file
from msrun.cli.options.table import TABLE
from msrun.errors import UsageError
from msrun.parallel.config import ParallelConfig
from msrun.parallel.config_file import parse_config, read_config

PARALLEL = {
    "mesh": {"pp": 2, "dp": -1, "tp": 2},
    "mode": "semi_auto",
    "plan": [{"match": "*.up", "params": {"weight": ["tp", None]}, "out": [None, "tp"]}],
    "optimizer": {"zero": 1, "threshold": "64KiB"},
    "pipeline": {"stages": {"layers.[0-3]*": 0}, "microbatches": 8, "schedule": "1f1b"},
    "recompute": {"modules": ["layers.*"], "save": ["comm"]},
    "accumulate": 4,
    "reduce": {"op": "mean", "fuse": {"allreduce": "25MiB"}},
    "data": {"image": ["dp", None, "h", "w"]},
    "checkpoint": {"dir": "ckpt", "every": 1000, "keep": 5},
}
JOB = {
    "script": "train.py",
    "args": ["--lr", "1e-3"],
    "workers-per-node": 4,
    "preload": ["numpy"],
    "rdzv-conf": {"join_timeout": 300},
    "env": {"A": "on"},
    "parallel": PARALLEL,
}
WORDS = [
    "~", "yes", "-1", "0x10", "1e400", ".nan", "-.inf", "2020-01-01", "12:30:45", "=", "<<", "''",
    '"\\ud800"', '"\\0"', '"\\U0010ffff"', "!!binary aGk=", "!!set {a}", "!!python/name:os.system",
    "&a [*a]", "*a", "[", "{", "? [1]\n: 2", "9" * 400, "tp", "layers.[", "|\n  a\n",
    "%YAML 1.1\n---",
]  # fmt: skip
words = st.sampled_from(WORDS) | st.text(max_size=4).map(json.dumps)


def documents(tree):
    """Return YAML of `tree` in which some values or keys are other words, or characters wrong."""
    text = json.dumps(tree)
    tokens = [f'"{name}"' for name in ("mesh", "tp", "plan", "match", "params", "env", "args")]
    values = ["-1", "null", '"tp"', "1000", '"semi_auto"', '"1f1b"', '["comm"]', '"on"', "8"]
    swaps = st.lists(st.tuples(st.sampled_from(tokens + values), words), max_size=3)
    cuts = st.lists(st.tuples(st.integers(0, len(text)), words | st.text(max_size=3)), max_size=2)

    def damage(swapped, cut):
        found = text
        for old, new in swapped:
            found = found.replace(old, new, 1)
        for at, new in cut:
            found = found[:at] + new + found[at + len(new) :]
        return found

    return words | st.builds(damage, swaps, st.just([])) | st.builds(damage, swaps, cuts)


@settings(max_examples=150, deadline=None)
@given(documents(JOB))
def test_a_job_file_is_read_or_refused(content):
    with contextlib.suppress(UsageError):
        assert isinstance(parse_job_file(content, "job.yaml", TABLE), JobFile)


@settings(max_examples=150, deadline=None)
@given(documents({"parallel": PARALLEL}))
def test_a_parallel_file_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "parallel.yaml"
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(UsageError):
        assert isinstance(read_config(path), ParallelConfig)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.text(st.characters(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(list(PARALLEL)) | st.text(max_size=2) | st.dates() | st.integers(),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*PARALLEL, "zz"]), plain, st.booleans())
def test_a_parallel_mapping_is_read_or_refused(key, value, is_whole):
    with contextlib.suppress(UsageError):
        parse_config(value if is_whole else PARALLEL | {key: value})


@pytest.mark.parametrize("content", ["2020-01-01: {}", 'mode: "\\ud800"', "? {a: 1}\n: 2"])
def test_what_was_once_a_bug_is_refused(tmp_path, content):
    path = tmp_path / "p.yaml"
    path.write_text(content)

    with pytest.raises(UsageError):
        read_config(path)
