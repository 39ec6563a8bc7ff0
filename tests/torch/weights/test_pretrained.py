"""Weights of transformers into and out of models of `rt.shard`, in every layout."""

import pytest
import torch
from ranks import run_warm
from weights_zoo import KINDS, LAYOUTS, build, inputs, logits

import msrun
from msrun.parallel.local import full_tensor

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with what transformers wrote of each model, in several files."""
    folder = tmp_path_factory.mktemp("saved")
    for name in KINDS:
        build(name).save_pretrained(folder / name, max_shard_size="8KB")
        assert len(list((folder / name).glob("*.safetensors"))) > 2
    return folder


def _round_trip(name, layout, folder, target):
    """Load into a model of other weights; return logits, and write the weights again."""
    rt = msrun.init(LAYOUTS[layout][1])
    model = rt.shard(build(name, seed=11), sample=inputs(name))
    found = rt.load_pretrained(model, folder / name)
    assert found == ([], [])
    said = full_tensor(logits(model, name))
    rt.save_pretrained(model, target, max_shard_size="10kB")
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_what_transformers_saved_is_loaded_and_saved_again(name, layout, saved, tmp_path):
    whole = build(name)
    expected = logits(whole, name)

    found = run_warm(_round_trip, LAYOUTS[layout][0], name, layout, saved, tmp_path / "again")

    for said in found:
        torch.testing.assert_close(said, expected, atol=1e-5, rtol=1e-5)
    again, said = type(whole).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(said.values()), said
    expected_state = whole.state_dict()
    assert again.state_dict().keys() == expected_state.keys()
    for key, value in again.state_dict().items():
        assert torch.equal(value, expected_state[key]), key
