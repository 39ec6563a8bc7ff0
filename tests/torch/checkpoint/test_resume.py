"""`rt.save`, `rt.load` and `rt.resume` under `rt.shard`, and in a job that is started again."""

import json
from datetime import timedelta

import pytest
import torch
from checkpoint_layouts import from_few_and_from_all
from ranks import MODELS, OPTIMIZERS, STEPS, assert_equal_curves, batches, build, oracle, run_warm
from support import script
from test_grid import V, pp

import msrun

pytestmark = pytest.mark.torch

LAYERS = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
    {"match": "embed", "style": "embedding"},
    {"match": "head", "style": "vocab"},
]
LAYOUTS = {
    "one process": (1, {}),
    "dp": (2, {"mesh": {"dp": 2}}),
    "zero3": (3, {"optimizer": {"zero": 3, "threshold": 100}}),
    "tp": (2, {"mesh": {"tp": 2}, "plan": LAYERS}),
    "dp x tp, zero1": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": LAYERS, "optimizer": {"zero": 1}}),
    "zero2 in copies": (4, {"optimizer": {"zero": 2, "shard_size": 2}}),
    "pp": (2, pp()),
    "pp x dp zbv, zero3": (4, pp(V, "zbv") | {"optimizer": {"zero": 3}}),
}
# What the optimizer remembers of the first step shows in the last loss.
SAVED_AFTER = 1
# A batch that 1, 2, 3 and 4 ranks divide.
BATCH = 12


def train(config, folder, steps, *, is_new):
    """Train some of the steps, from the start or from the checkpoint, which stays in `folder`."""
    runtime = msrun.init(config)
    network = runtime.shard(build("transformer"))
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
    if not is_new:
        assert runtime.load(network, update, path=folder) == steps.start
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for batch in batches("transformer", size=BATCH)[steps]:
        part = [t.chunk(count)[share] for t in batch]
        losses.append(runtime.step(network, update, MODELS["transformer"][1], *part).item())
    if is_new:
        runtime.save(network, update, step=steps.stop, path=folder)
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return where each layout left its checkpoint; none of them is saved twice."""
    folders = {}
    for name, (ranks, config) in LAYOUTS.items():
        folders[name] = str(tmp_path_factory.mktemp("checkpoints") / "one")
        run_warm(new, ranks, config, folders[name])
    return folders


def new(config, folder):
    return train(config, folder, slice(0, SAVED_AFTER), is_new=True)


def from_each(config, folders):
    found = {}
    for name, folder in folders.items():
        found[name] = train(config, folder, slice(SAVED_AFTER, STEPS), is_new=False)
        msrun.init().close()
    return found


@pytest.mark.parametrize(("target", "sources"), from_few_and_from_all(LAYOUTS))
@pytest.mark.few(1)
def test_any_layout_goes_on_from_any_other(saved, target, sources):
    ranks, config = LAYOUTS[target]
    of_ranks = run_warm(from_each, ranks, config, {name: saved[name] for name in sources})

    expected = oracle("transformer", "adamw", None, BATCH)
    for source in sources:
        assert_equal_curves([found[source] for found in of_ranks], expected[SAVED_AFTER:])


JOB = """
    import json, os, signal, sys, threading
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.data import TensorDataset

    import msrun

    rt = msrun.init()

    def die_while_saving(event, args):
        if event == "open" and "step_00000008" in str(args[0]):
            if threading.current_thread() is not threading.main_thread():
                os.kill(os.getpid(), signal.SIGKILL)

    if "fail" in sys.argv and rt.generation == 0 and rt.rank == 1:
        sys.addaudithook(die_while_saving)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    model = rt.shard(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = rt.loader(data, 4, shuffle=True)
    step = rt.resume(model, optimizer, loader, extra={"scheduler": scheduler})
    rt.print("began at", step)
    while step < 15:
        for x, y in loader:
            if step == 10 and rt.generation == 1 and "fail" in sys.argv:
                raise RuntimeError("no luck")
            loss = rt.step(model, optimizer, functional.mse_loss, x, y)
            scheduler.step()
            step += 1
            rt.print("loss", step, json.dumps(loss.item()))
            if step == 15:
                break
"""
CONFIG = """
parallel:
  seed: 3
  checkpoint: {dir: ckpt, every: 4, keep: 2, async: true}
"""


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_job_that_is_started_again_goes_on(finished, tmp_path, zero):
    curves = {}
    for name, words in (("whole", []), ("broken", ["fail"])):
        folder = tmp_path / name
        folder.mkdir()
        config = CONFIG + f"  optimizer: {{zero: {zero}}}\n"
        (folder / "p.yaml").write_text(config)
        options = ["--workers-per-node", "2", "--max-restarts", "2", "--parallel", "p.yaml"]
        job = finished(folder, *options, script(folder, JOB), *words)
        assert job.process.returncode == 0
        lines = job.log().splitlines()
        curves[name] = {
            words[1]: json.loads(words[2])
            for line in lines
            if (words := line.split())[:1] == ["loss"]
        }
        began = [line for line in lines if line.startswith("began")]
        kept = sorted(path.name for path in (folder / "ckpt").iterdir())
        assert kept == ["step_00000008", "step_00000012"]

    # One rank was killed in the middle of saving step 8, then one failed behind step 8.
    assert began == ["began at 0", "began at 4", "began at 8"]
    # Dropout, the loader's order and the schedule of the learning rate go on as they were.
    assert curves["broken"] == curves["whole"]


def unlike(folder):
    runtime = msrun.init()
    other = runtime.shard(build("mlp"))
    with pytest.raises(msrun.errors.UsageError) as caught:
        runtime.load(other, torch.optim.SGD(other.parameters(), lr=0.1), path=folder)
    return caught.value.message


def test_a_checkpoint_of_another_model_is_refused(saved):
    for message in run_warm(unlike, 2, saved["dp"]):
        assert "fc1.weight" in message


def ended_early(folder):
    """Train to where a checkpoint is due; rank 1 does not come to the end."""
    runtime = msrun.init({"checkpoint": {"dir": folder, "every": 1}})
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    runtime.step(network, update, MODELS["mlp"][1], *batches("mlp")[0])
    if runtime.rank == 1:
        return ""
    with pytest.raises(msrun.errors.UsageError) as caught:
        runtime.checkpoints.finish_at_exit(timedelta(seconds=1))
    return caught.value.message


def test_the_end_does_not_wait_for_ever_for_a_rank_that_ended_early(tmp_path):
    message = run_warm(ended_early, 2, str(tmp_path / "ckpt"))[0]

    assert message.startswith("not all ranks came within 0:00:01: ")
    assert "1" in message.partition(": ")[2]


def test_ranks_that_save_after_different_steps_are_refused(tmp_path):
    """The directory and the number of steps are rank 0's, the tensors each rank's own."""
    here, there = run_warm(_save_apart, 2, tmp_path)

    assert here == "rank 1: rt.save has step 8 here and step 7 on rank 0"
    assert there == "rt.save has step 8 here and step 7 on rank 0"
    assert list(tmp_path.iterdir()) == []


def _save_apart(folder):
    runtime = msrun.init({"checkpoint": {"dir": str(folder)}})
    network = runtime.shard(torch.nn.Linear(2, 2))
    said = []
    for path in (None, folder / "named"):
        with pytest.raises(msrun.CheckpointError) as refused:
            runtime.save(network, step=7 + runtime.rank, path=path)
        said.append(refused.value.message)
    assert said[0] == said[1]
    return said[0]
