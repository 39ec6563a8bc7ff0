"""`msrun convert`: one file of a checkpoint, and a checkpoint of one file."""

import pickle
import subprocess
import sys

import pytest
import torch
from checkpoint_calls import in_one, make, refusal, start, train
from checkpoint_layouts import (
    LAYOUTS,
    SAVED_AFTER,
    expected_losses,
    resume_all,
    save_early,
)
from ranks import assert_equal_curves, build, run_warm

from msrun.cli.main import main
from msrun.parallel.checkpoint import schema
from msrun.parallel.checkpoint.convert import convert

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

SOURCE, STAGES = "zero3 x tp", "pp2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of a layout that divides most tensors twice, and of stages."""
    folder = tmp_path_factory.mktemp("saved")
    for name in (SOURCE, STAGES):
        run_warm(save_early, LAYOUTS[name].world_size, name, folder)
    return folder


def read(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(SOURCE, "zero3 on 3", marks=pytest.mark.slow),
        *((SOURCE, STAGES), (STAGES, SOURCE)),
    ],
)
def test_merged_and_split_again(saved, tmp_path, source, target):
    line = convert(saved / source, tmp_path / "all.pt", optimizer=True)
    convert(tmp_path / "all.pt", tmp_path / "split", optimizer=True)

    assert line == f"{tmp_path}/all.pt: 6 tensors of the model after {SAVED_AFTER} steps"
    found = run_warm(resume_all, LAYOUTS[target].world_size, target, tmp_path, ["split"])
    assert_equal_curves([losses["split"] for losses in found], expected_losses()[SAVED_AFTER:])


def test_stages_and_other_layouts_are_merged_alike(saved, tmp_path):
    found = []
    for name in (SOURCE, STAGES):
        convert(saved / name, tmp_path / f"{name}.safetensors")
        convert(tmp_path / f"{name}.safetensors", tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name}.pt")
        found.append(read(tmp_path / f"{name}.pt"))

    one, other = found
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name])


@pytest.mark.parametrize("source", [SOURCE, STAGES])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_model_alone(saved, tmp_path, suffix, source):
    file, again, twice = tmp_path / f"m{suffix}", tmp_path / "again", tmp_path / "2.pt"
    convert(saved / source, file)
    convert(file, again)
    convert(again, twice)

    model, merged = build("mlp"), read(twice)
    model.load_state_dict(merged)
    if suffix == ".pt":
        assert read(file).keys() == merged.keys()
    assert schema.read_manifest(again).step == 0
    index = schema.read_index(again, schema.read_manifest(again))
    assert {name.partition(".")[0] for name in index.tensors} == {"model"}
    assert {len(stored.chunks) for stored in index.tensors.values()} == {1}


def test_files_of_old_versions(tmp_path):
    values = {"a": torch.arange(3), "b": torch.nn.Parameter(torch.ones(2))}
    torch.save(values, tmp_path / "old.pt", _use_new_zipfile_serialization=False)

    convert(tmp_path / "old.pt", tmp_path / "new.pth")

    assert {name: value.tolist() for name, value in read(tmp_path / "new.pth").items()} == {
        "a": [0, 1, 2],
        "b": [1, 1],
    }


def test_others_read_what_is_merged(saved):
    package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    convert(saved / SOURCE, saved / "other.safetensors")
    convert(saved / SOURCE, saved / "other.pt")

    found = package.load_file(saved / "other.safetensors")
    package.save_file(found, saved / "theirs.safetensors")
    convert(saved / "theirs.safetensors", saved / "theirs.pt")

    expected = read(saved / "other.pt")
    for there in (found, read(saved / "theirs.pt")):
        assert there.keys() == expected.keys()
        assert all(torch.equal(there[name], expected[name]) for name in expected)


def _tied(folder):
    _, checkpoints = start()
    network, optimizer = make("transformer")
    train(network, optimizer, slice(1), "transformer")
    checkpoints.save(folder / "c" / "step_00000009", network, optimizer, step=9)
    convert(folder / "c", folder / "t.pt", optimizer=True)
    convert(folder / "c", folder / "t.safetensors")
    convert(folder / "t.pt", folder / "t", optimizer=True)
    merged = read(folder / "t.pt")
    kept = merged["optimizer"]
    assert merged["step"] == 9
    assert merged["model"].keys() == network.state_dict().keys()
    assert merged["model"]["head.weight"].data_ptr() == merged["model"]["embed.weight"].data_ptr()
    assert "head.weight" not in kept["state"]
    assert [group["lr"] for group in kept["param_groups"]] == [optimizer.param_groups[0]["lr"]]
    again, update = make("transformer")
    checkpoints.load(folder / "t", again, update)
    assert train(again, update, slice(1, 3), "transformer") == train(
        network, optimizer, slice(1, 3), "transformer"
    )


@in_one
def test_tied_weights(folder):
    """Stay one tensor in a .pt file, and are two in .safetensors, which knows no other way."""
    _tied(folder)


@in_one
def test_no_optimizer_to_convert(folder):
    """Is an error, not a file without one."""
    _, checkpoints = start()
    network, _ = make()
    checkpoints.save(folder / "c", network, step=1)

    assert refusal(convert, folder / "c", folder / "c.pt", optimizer=True) == (
        f"{folder}/c has no state of an optimizer"
    )
    assert not (folder / "c.pt").exists()


class Dangerous:
    def __reduce__(self):
        return (print, ("this ran",))


def test_refusals(tmp_path, capsys):
    files = {
        "pickled.pt": pickle.dumps(Dangerous()),
        "random.pt": b"\x80random",
        "random.safetensors": b"12345678{}",
        "short.safetensors": b"123",
        "long.safetensors": (1 << 40).to_bytes(8, "little") + b"{}",
        "text.txt": b"hello",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}'
    (tmp_path / "beyond.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    torch.save({"state_dict": {"a": torch.zeros(1)}}, tmp_path / "nested.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    torch.save({"model": {}, "optimizer": {"state": {0: {}}}}, tmp_path / "numbers.pt")
    (tmp_path / "there").mkdir()

    expected = {
        ("pickled.pt", "x"): "HERE/pickled.pt is more than a dict of plain tensors",
        ("random.pt", "x"): "HERE/random.pt is more than a dict of plain tensors",
        ("random.safetensors", "x"): "HERE/random.safetensors is no safetensors file",
        ("short.safetensors", "x"): "HERE/short.safetensors is no safetensors file",
        ("long.safetensors", "x"): "HERE/long.safetensors is no safetensors file",
        ("beyond.safetensors", "x"): "HERE/beyond.safetensors is no safetensors file",
        ("nested.pt", "x"): "HERE/nested.pt: state_dict is no tensor, but a dict",
        ("list.pt", "x"): "HERE/list.pt holds no dict of tensors by name",
        ("numbers.pt", "x"): "HERE/numbers.pt: its optimizer is no dict with parameters by name",
        ("text.txt", "x"): (
            "HERE/text.txt is no file of tensors: its name ends in none of .safetensors, .pt, "
            ".pth, .bin"
        ),
        ("nowhere", "x"): "HERE/nowhere: there is no checkpoint",
        ("list.pt", "there"): "HERE/there exists",
        ("there", "x.ckpt"): (
            "HERE/x.ckpt is no file of tensors: its name ends in none of .safetensors, .pt, .pth, "
            ".bin"
        ),
    }
    for (source, target), sentence in expected.items():
        found = refusal(convert, tmp_path / source, tmp_path / target)
        assert found.replace(str(tmp_path), "HERE") == sentence
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "x").exists()


def test_the_verb(tmp_path, capsys):
    torch.save({"a.weight": torch.ones(2), "a.bias": torch.zeros(1)}, tmp_path / "a.pt")
    code = main(["convert", f"{tmp_path}/a.pt", f"{tmp_path}/deep/down/a.safetensors"])

    expected = f"{tmp_path}/deep/down/a.safetensors: 2 tensors of the model\n"
    assert (code, *capsys.readouterr()) == (0, "", expected)
    for words, sentence in {
        "": "missing argument 'SRC'",
        "a": "missing argument 'DST'",
        "a b c": "got unexpected extra argument (c)",
        "--fast a b": "there is no option --fast",
        "a b.safetensors --optimizer": (
            "b.safetensors: safetensors has no place for an optimizer (choose .pt)"
        ),
    }.items():
        assert main(["convert", *words.split()]) == 2
        assert capsys.readouterr().err == f"error: {sentence}\n"


def test_help_needs_no_torch():
    code = (
        "import sys; from msrun.cli.main import main; main(['convert', '--help']); "
        "print('torch' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout.startswith("Usage: msrun convert [OPTIONS] SRC DST\n")
    assert done.stdout.endswith("\nFalse\n")
