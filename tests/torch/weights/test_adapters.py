"""Models of peft: the base model loaded under the adapters, and adapters saved alone."""

import pytest
import torch
from ranks import run_warm
from weights_zoo import LAYOUTS, build, inputs, logits

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

NAME = "Llama"
CASES = ("dp 2", "zero 1", "zero 3", "tp 2", "zero 1, tp 2")


def adapted(seed):
    """Return a model with adapters of low rank; those of a seed are equal everywhere."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(build(NAME, seed=seed), settings)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.3)
    return model


def _round_trip(layout, folder):
    rt = msrun.init(LAYOUTS[layout][1])
    model = rt.shard(adapted(11), sample=inputs(NAME))
    base = rt.load_pretrained(model, folder / "base")
    assert base == ([], [])
    before = full_tensor(logits(model, NAME))
    found = rt.load_pretrained(model, folder / "adapter")
    assert found == ([], [])
    said = full_tensor(logits(model, NAME))
    if layout != "dp 2":
        with pytest.raises(ModelError, match="would write the parts of this rank alone"):
            model.save_pretrained(folder / "parts")
    rt.save_pretrained(model, folder / "again")
    return before, said


@pytest.mark.parametrize("layout", CASES)
def test_adapters_are_loaded_and_saved_alone(layout, tmp_path):
    build(NAME).save_pretrained(tmp_path / "base", max_shard_size="8KB")
    theirs = adapted(5)
    theirs.save_pretrained(tmp_path / "adapter")
    whole = peft.PeftModel.from_pretrained(build(NAME), tmp_path / "adapter")
    expected = logits(whole, NAME)
    plain = logits(build(NAME), NAME)

    for before, said in run_warm(_round_trip, LAYOUTS[layout][0], layout, tmp_path):
        assert not torch.allclose(before, plain)  # it had adapters of its own
        torch.testing.assert_close(said, expected, atol=1e-5, rtol=1e-5)

    files = {file.name for file in (tmp_path / "again").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files
    assert not any(name.startswith("model") for name in files)
    again = peft.PeftModel.from_pretrained(build(NAME), tmp_path / "again")
    assert torch.equal(logits(again, NAME), expected)


def _staged(folder, config):
    rt = msrun.init(config)
    model = rt.shard(adapted(11), sample=inputs(NAME))
    rt.load_pretrained(model, folder / "base")
    rt.load_pretrained(model, folder / "adapter")
    said = full_tensor(logits(model, NAME))
    try:
        rt.save_pretrained(model, folder / "again")
    except ModelError as error:
        return said, error.message
    return said, ""


STAGES = {
    "pp 2": LAYOUTS["pp 2"],
    "pp 2, zero 1": (
        4,
        LAYOUTS["pp 2"][1] | {"mesh": {"pp": 2, "dp": 2}, "optimizer": {"zero": 1}},
    ),
}


@pytest.mark.parametrize("layout", STAGES)
def test_stages_load_adapters_and_save_them_alone(layout, tmp_path):
    build(NAME).save_pretrained(tmp_path / "base")
    adapted(5).save_pretrained(tmp_path / "adapter")
    whole = peft.PeftModel.from_pretrained(build(NAME), tmp_path / "adapter")
    expected = logits(whole, NAME)
    size, config = STAGES[layout]
    for said, refusal in run_warm(_staged, size, tmp_path, config):
        assert not refusal
        torch.testing.assert_close(said, expected, atol=1e-5, rtol=1e-5)
    files = {file.name for file in (tmp_path / "again").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files
    assert not any(name.startswith("model") for name in files)
    again = peft.PeftModel.from_pretrained(build(NAME), tmp_path / "again")
    assert torch.equal(logits(again, NAME), expected)


def _planned(folder):
    rt = msrun.init({"mode": "auto", **LAYOUTS["pp 2"][1]})
    model = rt.shard(adapted(11), sample=inputs(NAME))
    with pytest.raises(ModelError) as caught:
        rt.save_pretrained(model, folder / "again")
    return caught.value.message


def test_stages_of_mode_auto_refuse_to_save_adapters_alone(tmp_path):
    for refusal in run_warm(_planned, 2, tmp_path):
        assert "that mode: auto does not divide into stages" in refusal
