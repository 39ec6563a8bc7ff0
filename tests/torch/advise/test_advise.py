"""What `msrun advise` recommends takes no more memory than it says, and is the first that fits."""

from __future__ import annotations

import weakref

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.advise.advise import AdviceRequest, advise_model
from msrun.parallel.advise.simulate import LiveBytes, simulate
from msrun.parallel.advise.techniques import ModelBytes, rank_bytes, techniques
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.local import local_part

pytestmark = pytest.mark.torch

GIB = 2**30
LOCAL = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.pow(2).mean()


def small(**sizes):
    return {"vocab_size": 128, **sizes}


def tokens(count):
    ids = torch.randint(0, 128, (count, 16))
    return {"input_ids": ids, "labels": ids}


def classes(count):
    return {"input_ids": torch.randint(0, 128, (count, 16)), "labels": torch.zeros(count).long()}


def pictures(count):
    return {"pixel_values": torch.randn(count, 3, 32, 32), "labels": torch.zeros(count).long()}


def model(name):
    """Return a small model of transformers."""
    from transformers import AutoConfig
    from transformers import models as families

    bert = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    bert["intermediate_size"] = 128
    sizes = {
        "gpt2": small(n_embd=64, n_layer=3, n_head=4),
        "llama": small(**bert, num_key_value_heads=2),
        "bert": small(**bert),
        "vit": {**bert, "image_size": 32, "patch_size": 8},
        "t5": small(d_model=64, d_ff=128, d_kv=16, num_layers=3, num_heads=4),
        "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]},
    }
    config = AutoConfig.for_model(name, **sizes[name])
    if name == "t5":
        config.decoder_start_token_id = 0
    if name == "resnet":
        config.layer_type = "basic"
    kinds = {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "bert": "BertForSequenceClassification",
        "vit": "ViTForImageClassification",
        "t5": "T5ForConditionalGeneration",
        "resnet": "ResNetForImageClassification",
    }
    return getattr(getattr(families, name), kinds[name])(config)


SAMPLES = {
    "gpt2": tokens,
    "llama": tokens,
    "bert": classes,
    "vit": pictures,
    "t5": tokens,
    "resnet": pictures,
}


class Held(LiveBytes):
    """Counts what storages have at each operator, also where they are resized."""

    def __init__(self):
        super().__init__()
        self._held = {}

    def know(self, tensors):
        for tensor in tensors:
            self._add(local_part(tensor))

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._held.pop(key, None))

    def _handle(self, func, _, args, kwargs):
        output = func(*args, **kwargs)
        for tensor in leaf_tensors([output]):
            self._add(local_part(tensor))
        held = [storage() for storage in list(self._held.values())]
        self.peak = max(self.peak, sum(one.nbytes() for one in held if one is not None))
        return output


def measured(name, config):
    """Return the most bytes that this rank had in three steps."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = rt.shard(model(name))
    optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), foreach=False))
    held = Held()
    for _ in range(3):
        batch = SAMPLES[name](LOCAL)
        held.know([*net.parameters(), *net.buffers(), *batch.values()])
        with held.counted():
            net(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return held.peak


def request(memory, world=2):
    return AdviceRequest(
        target="", world=world, memory=memory, batch=None, optimizer="adam", is_host=True
    )


def advice(name, memory):
    with torch.device("meta"):
        net = model(name)
    sample = [{key: x.to("meta") for key, x in SAMPLES[name](2).items()}]
    return advise_model(net, sample, LOCAL, request(memory))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_ranks_take_no_more_than_the_estimate_of_what_is_recommended(name):
    pytest.importorskip("transformers")
    rows = {row.name: row for row in advice(name, 1).rows}
    seen = set()
    for wanted in rows.values():
        if "accumulate" in wanted.name:
            continue
        found = advice(name, wanted.nbytes)
        if found.chosen in seen:
            continue
        seen.add(found.chosen)
        row = next(row for row in found.rows if row.name == found.chosen)
        for peak in run_ranks(measured, 2, name, found.config):
            assert 0.6 * row.nbytes < peak <= 1.05 * row.nbytes, found.chosen
    assert seen


def test_one_pass_takes_what_it_says():
    with torch.device("meta"):
        net, x = Net(), torch.randn(8, 64)
    peaks = simulate(net, [x])
    torch.manual_seed(0)
    real = Net()
    live = LiveBytes()
    live.know([*real.parameters()])
    x = torch.randn(8, 64)
    live.know([x])
    with live.counted():
        real(x).backward()
    assert peaks.total == live.peak
    assert peaks.activations < peaks.total
    assert all(param.is_meta for param in net.parameters())


def test_a_forward_that_needs_values_is_refused():
    class Branching(Net):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    with torch.device("meta"):
        net, x = Branching(), torch.randn(8, 64)
    with pytest.raises(UsageError, match="advise: Branching cannot run without values"):
        simulate(net, [x])


@pytest.mark.parametrize(
    ("memory", "name"),
    [(24, "data parallel"), (8, "zero 1"), (3, "zero 3"), (1, "")],
)
def test_the_first_that_fits_is_the_cheapest(memory, name):
    sizes = ModelBytes(
        params=4 * GIB,
        fixed=0,
        state=8 * GIB,
        largest=GIB // 16,
        unit=GIB // 16,
        root=GIB // 16,
        padding=0,
    )
    found = (
        one.name
        for one in techniques(1, can_recompute=True, world=8)
        if rank_bytes(one, sizes, (4 * GIB, GIB // 8, 0), 0, world=8, is_host=False) <= memory * GIB
    )
    assert next(found, "") == name
