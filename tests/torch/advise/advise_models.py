"""Small models of transformers for `msrun advise`, and what counts their bytes on a rank."""

from __future__ import annotations

import weakref

import torch

import msrun
from msrun.parallel.advise.advise import AdviceRequest, advise_model
from msrun.parallel.advise.simulate import LiveBytes, is_plain
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.local import local_part
from msrun.parallel.search.cost.topology import preset
from msrun.parallel.torch_compat import as_plain_tensors, is_fake

LOCAL, RANKS = 8, 2
TOTAL, TOKENS = RANKS * LOCAL, 1024


def small(**sizes):
    return {"vocab_size": 128, **sizes}


def tokens(count):
    ids = torch.randint(0, 128, (count, 16))
    return {"input_ids": ids, "labels": ids}


def classes(count):
    return {"input_ids": torch.randint(0, 128, (count, 16)), "labels": torch.zeros(count).long()}


def pictures(count):
    return {"pixel_values": torch.randn(count, 3, 32, 32), "labels": torch.zeros(count).long()}


def model(name, long=16):
    """Return a small model of transformers, which takes `long` tokens at least."""
    from transformers import AutoConfig
    from transformers import models as families

    bert = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    bert["intermediate_size"] = 128
    sizes = {
        "gpt2": small(n_embd=64, n_layer=3, n_head=4, n_positions=max(long, 1024)),
        "llama": small(**bert, num_key_value_heads=2),
        "bert": small(**bert),
        "vit": {**bert, "image_size": 32, "patch_size": 8},
        "t5": small(d_model=64, d_ff=128, d_kv=16, num_layers=3, num_heads=4),
        "mixtral": small(**bert, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
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
        "mixtral": "MixtralForCausalLM",
        "resnet": "ResNetForImageClassification",
    }
    return getattr(getattr(families, name), kinds[name])(config)


SAMPLES = {
    "gpt2": tokens,
    "llama": tokens,
    "bert": classes,
    "vit": pictures,
    "t5": tokens,
    "mixtral": tokens,
    "resnet": pictures,
}


class Held(LiveBytes):
    """Counts what storages have at each operator, also where they are resized."""

    def __init__(self):
        super().__init__()
        self._held = {}

    def know(self, tensors):
        with as_plain_tensors():  # experts of other ranks refuse functions
            for tensor in tensors:
                self._add(local_part(tensor))

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._held.pop(key, None))

    def _handle(self, func, types, args, kwargs):
        if not is_plain(types):
            return NotImplemented
        output = func(*args, **kwargs)
        for tensor in leaf_tensors([output]):
            # A pipeline records itself on tensors without memory; sparse ones are marks of ZeRO.
            if not (is_fake(tensor) or tensor.is_meta or tensor.is_sparse):
                self._add(local_part(tensor))
        held = [storage() for storage in list(self._held.values())]
        self.peak = max(self.peak, sum(one.nbytes() for one in held if one is not None))
        return output


def of_length(name):
    """Return what makes batches of `name`: of long sequences if it ends so."""
    kind, _, is_long = name.partition(" ")
    if not is_long:
        return SAMPLES[kind]

    def tokens(count):
        ids = torch.randint(0, 128, (count, TOKENS))
        return {"input_ids": ids, "labels": ids}

    return tokens


def made(name):
    kind, _, is_long = name.partition(" ")
    return model(kind, long=TOKENS) if is_long else model(kind)


def local(batch, rt):
    """Return the samples of this rank."""
    count, share = rt.layout.axes.get("dp", 1), rt.coordinate.get("dp", 0)
    return {key: x.chunk(count)[share].clone() for key, x in batch.items()}


def measured(name, config):
    """Return the most bytes that this rank had in three steps."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    # Before ranks have random streams of their own.
    batches = [local(of_length(name)(TOTAL), rt) for _ in range(3)]
    net = rt.shard(made(name), sample=batches[0])
    optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), foreach=False))
    held = Held()
    while batches:
        batch = batches.pop()
        held.know([*net.parameters(), *net.buffers(), *batch.values()])
        with held.counted():
            rt.step(net, optimizer, batch)
    return held.peak


def request(memory, world=RANKS):
    return AdviceRequest(
        target="",
        world=world,
        memory=memory,
        batch=None,
        optimizer="adam",
        topology=preset("cpu"),
    )


def advice(name, memory, sample=None):
    with torch.device("meta"):
        net = model(name)
    given = SAMPLES[name](2) if sample is None else sample
    sample = [{key: x.to("meta") for key, x in given.items()}]
    return advise_model(net, sample, LOCAL, request(memory))
