"""What `rt.load_pretrained` reads of files, how much of them, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_warm
from torch import nn

import msrun
from msrun.errors import CheckpointError
from msrun.parallel.checkpoint.tensors import plan_file, slot, write_file
from msrun.parallel.local import full_tensor, local_part

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

WIDE = 2048
ZERO = {"optimizer": {"zero": 3}}
TP = {
    "mesh": {"tp": 2},
    "plan": [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}],
}


class Wide(nn.Module):
    """Two layers whose rows and columns fill pages, and a buffer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, WIDE, bias=False)
        self.down = nn.Linear(WIDE, 16, bias=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def write(path, tensors):
    write_file(path, plan_file([slot(*item) for item in tensors.items()]), tensors.__getitem__)


def weights(dtype=torch.float32):
    draw = torch.Generator().manual_seed(2)
    return {
        "up.weight": torch.randn(WIDE, 16, generator=draw).to(dtype),
        "down.weight": torch.randn(16, WIDE, generator=draw).to(dtype),
        "count": torch.tensor(7),
    }


def _bytes_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _loaded(config, path):
    """Return the bytes read, those of this rank's parts, and the whole tensors."""
    rt = msrun.init(config)
    with rt.init_on_meta():
        model = Wide()
    model = rt.shard(model)
    rt.load_pretrained(model, path)  # reads what it imports, too
    before = _bytes_read()
    assert rt.load_pretrained(model, path) == ([], [])
    read = _bytes_read() - before
    own = sum(local_part(t).nbytes for t in (model.up.weight, model.down.weight, model.count))
    return read, own, {name: full_tensor(t) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("config", [ZERO, TP], ids=["zero", "tp"])
def test_a_rank_reads_the_bytes_of_its_own_parts(config, tmp_path):
    write(tmp_path / "model.safetensors", weights())
    for read, own, found in run_warm(_loaded, 2, config, tmp_path):
        assert own == WIDE * 16 * 4 + 8  # half of two matrices
        assert own <= read < own + 10_000, (read, own)  # and the header, in a buffer
        assert found.keys() == weights().keys()
        assert all(torch.equal(value, weights()[name]) for name, value in found.items())


def test_values_of_another_precision_are_rounded(tmp_path):
    write(tmp_path / "half.safetensors", weights(torch.bfloat16))
    expected = weights(torch.bfloat16)["up.weight"].float()
    for _, _, found in run_warm(_loaded, 2, ZERO, tmp_path / "half.safetensors"):
        assert found["up.weight"].dtype == torch.float32
        assert torch.equal(found["up.weight"], expected)


@pytest.mark.parametrize("content", ["plain", "nested", "of ddp", "old"])
def test_files_of_torch_save(content, tmp_path):
    tensors = weights()
    if content == "of ddp":
        tensors = {f"module.{name}": tensor for name, tensor in tensors.items()}
    tree = {"state_dict": tensors, "epoch": 3} if content == "nested" else tensors
    is_new = content != "old"
    torch.save(tree, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_new)
    for _, _, found in run_warm(_loaded, 2, TP, tmp_path):
        assert all(torch.equal(value, weights()[name]) for name, value in found.items())


def _refusals(paths):
    rt = msrun.init(ZERO)
    model = rt.shard(Wide())
    before = full_tensor(model.up.weight).clone()
    said = []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            rt.load_pretrained(model, path)
        said.append(caught.value.message.removeprefix("rank 0: "))
        assert torch.equal(full_tensor(model.up.weight), before)
    return said


def test_refusals(tmp_path):
    good = weights()
    files = {
        "lacks": {name: good[name] for name in ("up.weight", "count")},
        "more": good | {"head.weight": torch.zeros(1)},
        "other": {("to" if name == "count" else name): good[name] for name in good},
        "shape": good | {"up.weight": torch.zeros(16, WIDE)},
        "whole": good | {"up.weight": torch.zeros(WIDE, 16, dtype=torch.int64)},
        "eight": good | {"up.weight": torch.zeros(WIDE, 16).to(torch.float8_e4m3fn)},
    }
    for name, tensors in files.items():
        write(tmp_path / f"{name}.safetensors", tensors)
    (tmp_path / "text.safetensors").write_text("no file of tensors")
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    index = tmp_path / "model.safetensors.index.json"
    for folder, file in (
        (tmp_path / "gone", "up.safetensors"),
        (tmp_path / "away", "../up.safetensors"),
        (tmp_path / "false", "lacks.safetensors"),
    ):
        folder.mkdir()
        write(folder / "lacks.safetensors", files["lacks"])
        (folder / index.name).write_text(json.dumps({"weight_map": dict.fromkeys(good, file)}))

    expected = {
        "lacks.safetensors": "HERE/lacks.safetensors lacks down.weight of Wide",
        "more.safetensors": ("HERE/more.safetensors has head.weight, for which Wide has no place"),
        "other.safetensors": "HERE/other.safetensors lacks count of Wide, and has to instead",
        "shape.safetensors": (
            "up.weight is [2048, 16] in the model and [16, 2048] in HERE/shape.safetensors"
        ),
        "whole.safetensors": (
            "up.weight is float32 in the model and I64 in HERE/whole.safetensors"
        ),
        "eight.safetensors": (
            "up.weight is float32 in the model and F8_E4M3 in HERE/eight.safetensors"
        ),
        "text.safetensors": "HERE/text.safetensors is no safetensors file",
        "text.txt": (
            "HERE/text.txt is no file of weights: its name ends in none of .safetensors, "
            ".safetensors.index.json, .bin, .pt, .pth"
        ),
        "empty": (
            "HERE/empty has no file of weights, such as model.safetensors or "
            "model.safetensors.index.json"
        ),
        "nowhere": "HERE/nowhere: there is no such file or directory",
        "gone": "HERE/gone/up.safetensors cannot be read: No such file or directory",
        "away": (
            "HERE/away/model.safetensors.index.json: '../up.safetensors' is no name of a file "
            "beside it"
        ),
        "false": (
            "HERE/false/model.safetensors.index.json says that down.weight is in "
            "lacks.safetensors, and lacks.safetensors has no such tensor"
        ),
    }
    said = run_warm(_refusals, 2, [tmp_path / name for name in expected])
    found = [text.replace(str(tmp_path), "HERE") for text in said[0]]
    assert found == list(expected.values())


def _not_strict(path):
    rt = msrun.init(ZERO)
    model = rt.shard(Wide())
    before = full_tensor(model.down.weight).clone()
    found = rt.load_pretrained(model, path, strict=False)
    assert torch.equal(full_tensor(model.up.weight), weights()["up.weight"])
    assert torch.equal(full_tensor(model.down.weight), before)
    return found


def test_names_that_do_not_match_are_returned_if_wanted(tmp_path):
    tensors = weights() | {"head.weight": torch.zeros(1)}
    del tensors["down.weight"]
    write(tmp_path / "model.safetensors", tensors)
    assert run_warm(_not_strict, 2, tmp_path) == [(["down.weight"], ["head.weight"])] * 2


def _saved(path):
    rt = msrun.init(ZERO)
    model = rt.shard(Wide())
    rt.load_pretrained(model, path / "source")
    rt.save_pretrained(model, path / "target", max_shard_size="100kB")
    many = sorted(file.name for file in (path / "target").iterdir())
    rt.barrier()
    rt.save_pretrained(model, path / "target")
    again = rt.shard(Wide())
    rt.load_pretrained(again, path / "target")
    rt.barrier()
    with pytest.raises(CheckpointError):
        rt.save_pretrained(model, path / "source" / "model.safetensors" / "inside")
    return many, full_tensor(again.down.weight.detach())


def test_saved_again_replaces_all_files_of_the_earlier_model(tmp_path):
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "model.safetensors", weights())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    for many, down in run_warm(_saved, 2, tmp_path):
        assert many == [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]
        assert torch.equal(down, weights()["down.weight"])
    left = sorted(file.name for file in (tmp_path / "target").iterdir())
    assert left == ["model.safetensors", "tokenizer.json"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def _two_values(path):
    rt = msrun.init(ZERO)
    model = rt.shard(Tied())
    rt.load_pretrained(model, path / "same.safetensors")
    rt.load_pretrained(model, path / "one.safetensors")
    with pytest.raises(CheckpointError) as caught:
        rt.load_pretrained(model, path / "other.safetensors")
    return caught.value.message.replace(str(path), "HERE")


def test_one_tensor_has_one_value(tmp_path):
    one, other = torch.ones(8, 4), torch.zeros(8, 4)
    write(tmp_path / "same.safetensors", {"embed.weight": one, "head.weight": one})
    write(tmp_path / "one.safetensors", {"head.weight": one})
    write(tmp_path / "other.safetensors", {"embed.weight": one, "head.weight": other})
    for said in run_warm(_two_values, 2, tmp_path):
        assert said == (
            "HERE/other.safetensors has other values for head.weight than for embed.weight, "
            "which are one tensor of the model"
        )


def _cannot_write(path):
    rt = msrun.init(ZERO)
    model = rt.shard(Wide())
    (path / ".model.safetensors.partial").mkdir(parents=True, exist_ok=True)
    rt.barrier()
    with pytest.raises(CheckpointError) as caught:
        rt.save_pretrained(model, path)
    return caught.value.message.removeprefix("rank 0: ")


def test_a_file_that_cannot_be_written_is_refused_on_all_ranks(tmp_path):
    expected = f"{tmp_path}/.model.safetensors.partial: Is a directory"
    assert run_warm(_cannot_write, 2, tmp_path) == [expected] * 2
    assert [file.name for file in tmp_path.iterdir()] == [".model.safetensors.partial"]
