"""Directories of other kinds: base models, old files, diffusers, plans of mode auto."""

import pytest
import torch
from ranks import run_warm
from torch.nn import functional
from weights_zoo import build, inputs, logits

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

ZERO = {"optimizer": {"zero": 3}}
AUTO = {
    "tp": {"mesh": {"dp": 1, "tp": 2}, "mode": "auto"},
    "pp": {"mesh": {"pp": 2}, "mode": "auto", "pipeline": {"stages": "auto", "microbatches": 2}},
}


def _head_of_base(folder):
    rt = msrun.init(ZERO)
    model = rt.shard(build("Llama, tied", seed=11))
    assert rt.load_pretrained(model, folder / "base") == ([], [])
    base = rt.shard(build("Llama, tied", seed=11).model)
    assert rt.load_pretrained(base, folder / "head") == ([], [])
    said = functional.linear(
        full_tensor(base(**inputs("Llama")).last_hidden_state.detach()),
        full_tensor(base.embed_tokens.weight.detach()),
    )
    return full_tensor(logits(model, "Llama")), said


def test_a_base_model_and_one_with_a_head_load_each_other(tmp_path):
    whole = build("Llama, tied")
    whole.save_pretrained(tmp_path / "head")
    whole.model.save_pretrained(tmp_path / "base")
    for found in run_warm(_head_of_base, 2, tmp_path):
        for said in found:
            torch.testing.assert_close(said, logits(whole, "Llama"), atol=1e-5, rtol=1e-5)


def _built_whole(folder):
    """Load before `rt.shard`, and files of `torch.save`; say what from_pretrained does on meta."""
    rt = msrun.init(ZERO)
    model = build("BERT", seed=11)
    rt.load_pretrained(model, folder / "pytorch_model.bin")
    model = rt.shard(model)
    before = full_tensor(logits(model, "BERT"))
    with rt.init_on_meta():
        other = build("BERT", seed=11)
    other = rt.shard(other)
    rt.load_pretrained(other, folder)
    with pytest.raises(ModelError):
        other.save_pretrained(folder / "parts")
    return before, full_tensor(logits(other, "BERT"))


def test_files_of_torch_save_before_and_after(tmp_path):
    whole = build("BERT")
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    for found in run_warm(_built_whole, 2, tmp_path):
        for said in found:
            torch.testing.assert_close(said, logits(whole, "BERT"), atol=1e-5, rtol=1e-5)


def _searched(name, layout, folder):
    rt = msrun.init(AUTO[layout])
    model = rt.shard(build(name, seed=11), sample=[inputs(name)["input_ids"]])
    rt.load_pretrained(model, folder / "source")
    rt.save_pretrained(model, folder / "again")


@pytest.mark.parametrize("layout", AUTO)
def test_plans_of_mode_auto(layout, tmp_path):
    whole = build("GPT-2")
    whole.save_pretrained(tmp_path / "source", max_shard_size="8KB")
    run_warm(_searched, 2, "GPT-2", layout, tmp_path)
    again = type(whole).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.state_dict().items())


def _unet(seed):
    diffusers = pytest.importorskip("diffusers")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return diffusers.UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
            block_out_channels=(8, 8), down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        )  # fmt: skip


def _diffused(folder):
    rt = msrun.init(ZERO)
    model = rt.shard(_unet(11))
    rt.load_pretrained(model, folder / "source")
    rt.save_pretrained(model, folder / "again")


def test_models_of_diffusers(tmp_path):
    whole = _unet(3)
    whole.save_pretrained(tmp_path / "source")
    run_warm(_diffused, 2, tmp_path)
    again = type(whole).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.state_dict().items())
