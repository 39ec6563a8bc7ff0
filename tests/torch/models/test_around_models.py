"""What people do with models of transformers beside a step, in every configuration."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import model_table
import pytest
from model_zoo import ZOO
from ranks import run_warm

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # Of transformers: there is a newer name, and people write this one.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

COLUMNS = ("dp", "zero 3", "tp", "pp", "accumulate", "auto")


def recomputing(name, options):
    """Return an entry of the table whose model recomputes by itself."""
    entry = ZOO[name]

    def make():
        model = entry.make()
        model.gradient_checkpointing_enable(*options)
        assert model.is_gradient_checkpointing
        return model

    return dataclasses.replace(entry, make=make)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama, labels", ()),
        ("Llama, labels", ({"use_reentrant": True},)),
        ("GPT-2", ()),
        ("T5, labels", ()),
    ],
)
def test_gradient_checkpointing_enable_changes_nothing(name, options, column):
    pytest.importorskip("transformers")
    entry = recomputing(name, options)
    assert model_table.run_cell(entry, column, model_table.LIMIT) == "equal"


def eager(name):
    """Return an entry of the table whose model computes attention without a fused kernel."""
    entry = ZOO[name]

    def make():
        model = entry.make()
        model.set_attn_implementation("eager")
        return model

    return dataclasses.replace(entry, make=make)


@pytest.mark.parametrize("column", ["recompute", "zero 3", "pp"])
@pytest.mark.parametrize("name", ["GPT-2", "BERT", "Llama, labels"])
def test_eager_attention(name, column):
    pytest.importorskip("transformers")
    assert model_table.run_cell(eager(name), column, model_table.LIMIT) == "equal"


# `zoo_entry` makes a torchvision importable that is of another torch.
FOUR_LAYERS = f"""
import sys
sys.path.insert(0, {str(Path(model_table.__file__).parent)!r})
import torch, transformers, zoo_entry
W = torch.randint(0, 64, (8, 16))

def gpt2():
    made = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, use_cache=False,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(made), {{"input_ids": W, "labels": W}}

def bert():
    made = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(made), {{"input_ids": W, "labels": W}}

def vit():
    made = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=5,
    )
    batch = {{"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.arange(8) % 5}}
    return transformers.ViTForImageClassification(made), batch
"""


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_a_search_of_four_layers_finds_a_mesh_and_a_plan(name, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "model.py").write_text(FOUR_LAYERS)
    command = [sys.executable, "-m", "msrun", "search", f"{tmp_path / 'model.py'}:{name}"]
    command += ["--world", "4", "--batch", "16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert math.prod(plan["mesh"].values()) == 4


def generated(name, column):
    """Return what a model generates after a step, and what one process does with its weights."""
    entry = dataclasses.replace(ZOO[name], is_combined=True)
    model = model_table.build(entry)
    whole = copy.deepcopy(model)
    rt = msrun.init(model_table.COLUMNS[column][1](entry, model))
    training = model_table.prepare(rt, entry, model)
    rt.step(training.model, training.optimizer, *training.batches[0])
    state = rt.state_dict(training.model)
    words = model_table.batches(entry)[0][0]["input_ids"][2:3, :4]
    options = {"max_new_tokens": 5, "do_sample": False}
    training.model.eval()
    try:
        found = training.model.generate(words, **options)
    except UsageError as error:
        return error.message, None
    if not rt.is_main:
        return found.tolist(), None
    whole.load_state_dict(state)
    return found.tolist(), whole.eval().generate(words, **options).tolist()


@pytest.mark.parametrize("column", model_table.COLUMNS)
@pytest.mark.parametrize("name", ["Llama, labels", "GPT-2, labels", "T5, labels"])
def test_generate(name, column):
    pytest.importorskip("transformers")
    answers = run_warm(generated, model_table.COLUMNS[column][0], name, column)
    if "pp" in column and "T5" in name:  # whose loop calls the encoder alone
        said = "parallel.pipeline: generate is of T5ForConditionalGeneration"
        said += ", of which this rank has one stage"
        assert answers == [(said, None)] * len(answers)
        return
    expected = answers[0][1]
    assert len(expected[0]) > 1
    assert [found for found, _ in answers] == [expected] * len(answers)
