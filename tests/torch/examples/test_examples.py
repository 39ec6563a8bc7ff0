"""The examples: each configuration fits, and the scripts learn under it as in one process."""

import contextlib
import io
import json
import os
import re
import runpy
from pathlib import Path

import pytest
from ranks import run_warm

from msrun.parallel.config_file import read_config
from msrun.parallel.layout import resolve

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIGS = {path.stem: path for path in sorted((EXAMPLES / "configs").glob("*.yaml"))}
DIGITS = [name for name in CONFIGS if name.startswith("digits_")]
LM = [name for name in CONFIGS if name.startswith("lm_")]
MOE = [name for name in CONFIGS if name.startswith("moe_")]
HF = [name for name in CONFIGS if name.startswith("hf_")]
REPORT = re.compile(r"epoch 1/1  last loss (\d\.\d+)\naccuracy (\d\.\d+) at ")


@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_fits(name, world_size):
    assert resolve(read_config(CONFIGS[name]), world_size).world_size == world_size


def run(script, config, entry, options, *arguments):
    """Call a function of a script whose constants are `options`; return what it prints."""
    if config:
        os.environ["MSRUN_CONFIG"] = str(config)
    function = runpy.run_path(str(EXAMPLES / script))[entry]
    function.__globals__.update(options)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        function(*arguments)
    return output.getvalue()


def train_digits(config):
    return run("train_digits_parallel.py", config, "main", {"EPOCHS": 1})


def train_lm(config, path):
    return run("train_lm.py", config, "train", {"STEPS": 3}, path)


def train_moe(config, path):
    return run("train_moe.py", config, "train", {"STEPS": 3}, path)


def finetune(config, *paths):
    return run("finetune_hf.py", config, "train", {"STEPS": 3}, *paths)


def report(text):
    """Return the last loss and the accuracy in `text`."""
    found = REPORT.search(text)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.fixture(scope="module")
def alone():
    """What one process learns in an epoch."""
    return report(run_warm(train_digits, 1, None)[0])


def test_every_configuration_belongs_to_a_script():
    assert (len(DIGITS), len(LM), len(MOE), len(HF)) == (8, 5, 2, 5)
    # `test_ctr` trains with parameter servers.
    assert {*DIGITS, *LM, *MOE, *HF, "ctr_servers"} == set(CONFIGS)


# An epoch takes seconds: CI trains under the richest.
ROWS = [pytest.param(n, marks=[pytest.mark.slow] * (n != "digits_dp_tp")) for n in DIGITS]


@pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank")
@pytest.mark.parametrize("name", ROWS)
def test_digits_are_learned_as_in_one_process(name, alone):
    loss, accuracy = report(run_warm(train_digits, 4, CONFIGS[name])[0])

    assert loss == pytest.approx(alone[0], abs=2e-3)
    assert accuracy == pytest.approx(alone[1], abs=0.01)
    assert accuracy > 0.5


@pytest.fixture(scope="module")
def text_alone(tmp_path_factory):
    """Losses of the first steps of the language model in one process."""
    path = tmp_path_factory.mktemp("text") / "losses.json"
    run_warm(train_lm, 1, None, str(path))
    return json.loads(path.read_text())


# The richest, and the one that divides parameters.
LM_ROWS = [
    pytest.param(n, 4, marks=[pytest.mark.slow] * (n not in ("lm_pp_dp_tp", "lm_zero3")))
    for n in LM
] + [pytest.param("lm_pp_dp_tp", 8, marks=pytest.mark.slow)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks"), LM_ROWS)
def test_text_is_learned_as_in_one_process(name, ranks, text_alone, tmp_path):
    path = tmp_path / "losses.json"
    run_warm(train_lm, ranks, CONFIGS[name], str(path))

    assert json.loads(path.read_text()) == pytest.approx(text_alone, abs=1e-5)
    assert len(text_alone) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_a_mixture_of_experts_is_trained_as_in_one_process(name, tmp_path):
    paths = [str(tmp_path / "alone.json"), str(tmp_path / "losses.json")]
    run_warm(train_moe, 1, None, paths[0])
    run_warm(train_moe, 4, CONFIGS[name], paths[1])
    alone, losses = (json.loads(Path(path).read_text()) for path in paths)

    assert losses == pytest.approx(alone, abs=1e-5)
    assert len(alone) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank")
@pytest.mark.parametrize(("name", "ranks"), [*((name, 4) for name in HF), ("hf_pp_dp_tp", 8)])
def test_a_model_of_transformers_is_trained_as_in_one_process(name, ranks, tmp_path):
    pytest.importorskip("transformers")
    paths = [tmp_path / "alone.json", tmp_path / "losses.json"]
    saved = [str(tmp_path / name) for name in ("of one", "of all")]
    run_warm(finetune, 1, None, None, saved[0], str(paths[0]))
    run_warm(finetune, ranks, CONFIGS[name], None, saved[1], str(paths[1]))
    alone, losses = (json.loads(path.read_text()) for path in paths)

    assert losses == pytest.approx(alone, rel=1e-6)
    assert len(alone) == 3
    run_warm(finetune, 1, None, saved[1], None, str(paths[0]))
    run_warm(finetune, ranks, CONFIGS[name], saved[0], None, str(paths[1]))
    gone_on, losses = (json.loads(path.read_text()) for path in paths)
    assert losses == pytest.approx(gone_on, rel=1e-5)
    assert gone_on[0] < alone[0]
