"""The loops of Lightning, Fabric and accelerate train a model of `rt.shard` as one process."""

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from ranks import build, run_ranks
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import msrun

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(240)]

TP = {
    "mesh": {"tp": 2},
    "plan": [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}],
}
PP = {"mesh": {"pp": 2}, "pipeline": {"stages": {"fc1": 0, "*": 1}, "microbatches": 2}}
CONFIGS = ({}, {"optimizer": {"zero": 1}}, {"optimizer": {"zero": 3}}, TP)
DOCS = Path(__file__).parents[3] / "docs"
BATCH, CLIP = 16, 0.5


def samples():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 16, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (64,), generator=generator))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def alone(accumulated=1):
    """Return the weights after one epoch in one process, by plain torch."""
    model = build("mlp")
    optimizer = adamw(model)
    for x, y in DataLoader(samples(), BATCH * accumulated):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict()


def begun(config):
    """Return the runtime, the model, and the loader of this rank's part."""
    warnings.simplefilter("ignore")
    rt = msrun.init(config)
    return rt, rt.shard(build("mlp")), rt.loader(samples(), BATCH // rt.layout.size("dp"))


def lightning_trainer(config, how, accumulated=1):
    """Train in the loop of Lightning: it takes the steps, or the training step does."""
    rt, net, loader = begun(config)
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.automatic_optimization = how != "step"

        def training_step(self, batch, _):
            x, y = batch
            if how == "step":
                loss_fn = functional.cross_entropy
                return rt.step(net, self.optimizers(), loss_fn, x, y, max_norm=CLIP)
            return functional.cross_entropy(self.net(x), y)

        def validation_step(self, batch, _):
            self.log("loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return rt.optimizer(adamw(net))

    options = {"devices": 2, "strategy": "ddp"} if how == "ddp" else {"devices": 1}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=None if how == "step" else CLIP,
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    try:
        trainer.fit(Module(), loader, rt.loader(samples(), 8))
    except msrun.ModelError as error:
        return error.message
    assert trainer.global_step == 4 // accumulated
    return rt.state_dict(net)


def fabric(config, how):
    rt, net, loader = begun(config)
    import lightning

    options = {"devices": 2, "strategy": "ddp"} if how == "ddp" else {"devices": 1}
    made = lightning.Fabric(accelerator="cpu", **options)
    made.launch()
    try:
        model, optimizer = made.setup(net, rt.optimizer(adamw(net)))
    except msrun.ModelError as error:
        return error.message
    for x, y in loader:
        optimizer.zero_grad()
        made.backward(functional.cross_entropy(model(x), y))
        made.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
    return rt.state_dict(net)


def accelerated(config, how):
    rt, net, loader = begun(config)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    try:
        if how == "ddp":
            accelerator.prepare(net)
        optimizer = accelerator.prepare(rt.optimizer(adamw(net)))
        if how == "loader":
            loader = accelerator.prepare(loader)
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
    except msrun.UsageError as error:
        return error.message
    return rt.state_dict(net)


def page(folder):
    """Run the loop of the page; return how often it stepped."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    texts = [(DOCS / name).read_text() for name in ("parallel.md", "how-to/from_accelerate.md")]
    blocks = re.findall(r"^```py.*?\n(.*?)^```$", "\n".join(texts), re.MULTILINE | re.DOTALL)
    prelude = next(block for block in blocks if "class Net" in block)
    code = next(block for block in blocks if "rt.shard(Net())\n\n    def training_step" in block)
    names = {"__name__": "__main__"}
    exec(prelude + "import lightning\n" + code, names)
    return names["trainer"].global_step, Path(folder, "checkpoint").exists()


def check(loop, config, *args, accumulated=1):
    found = run_ranks(loop, 2, config, *args, *[accumulated] * (accumulated > 1), timeout=120)[0]
    assert not isinstance(found, str), found
    for name, value in alone(accumulated).items():
        assert torch.allclose(found[name], value, atol=1e-6), name


@pytest.mark.parametrize("config", CONFIGS)
def test_lightning_takes_the_steps(config):
    pytest.importorskip("lightning")
    check(lightning_trainer, config, "automatic")


@pytest.mark.parametrize("config", [*CONFIGS, PP])
def test_the_training_step_of_lightning_takes_the_steps(config):
    pytest.importorskip("lightning")
    check(lightning_trainer, config, "step")


@pytest.mark.parametrize("config", CONFIGS)
def test_lightning_accumulates(config):
    pytest.importorskip("lightning")
    check(lightning_trainer, config, "automatic", accumulated=2)


def test_the_loop_of_the_page_runs(tmp_path):
    pytest.importorskip("lightning")
    found = run_ranks(page, 2, tmp_path, timeout=120)

    assert all(steps > 0 and is_saved for steps, is_saved in found)


@pytest.mark.parametrize("config", CONFIGS)
def test_fabric_trains(config):
    pytest.importorskip("lightning")
    check(fabric, config, "single")


@pytest.mark.parametrize("config", CONFIGS)
def test_accelerate_trains(config):
    pytest.importorskip("accelerate")
    check(accelerated, config, "optimizer")


DDP = "DistributedDataParallel got a model of rt.shard, whose gradients are reduced already"
READ = "another loader reads the batches of rt.loader, which are this rank's part already"


@pytest.mark.parametrize("config", [{}, TP, PP])
@pytest.mark.parametrize(
    ("loop", "needs", "how", "sentence"),
    [
        (lightning_trainer, "lightning", "ddp", DDP),
        (fabric, "lightning", "ddp", DDP),
        (accelerated, "accelerate", "ddp", DDP),
        (accelerated, "accelerate", "loader", READ),
    ],
)
def test_what_would_divide_model_or_data_again_is_refused(config, loop, needs, how, sentence):
    pytest.importorskip(needs)
    if config is PP and how == "loader":
        pytest.skip("a stage trains by rt.step alone")
    assert run_ranks(loop, 2, config, how, timeout=120) == [sentence] * 2
