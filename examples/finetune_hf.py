"""Train a causal language model of transformers, in parallel as a configuration file says.

    python examples/finetune_hf.py                                  # one process
    msrun --nproc-per-node 4 --parallel examples/configs/hf_zero3.yaml examples/finetune_hf.py
    msrun --nproc-per-node 8 --parallel examples/configs/hf_pp_dp_tp.yaml \
        examples/finetune_hf.py
    msrun --nproc-per-node 4 --parallel examples/configs/hf_dp_tp.yaml examples/finetune_hf.py \
        --model path/of/a/pretrained/model --save path/of/the/trained/model

`--model` is a directory that `save_pretrained` wrote.  Each rank reads its own part of it, and no
rank has the whole model.  Without it, the model is a small Llama with random weights.  The text is
Python's own documentation, read byte by byte, so nothing is downloaded.  Topics have different
lengths: batches are padded, and padding counts nothing in the loss, however the batch is divided.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import msrun

LENGTH = 64
GLOBAL_BATCH = 16
STEPS = 40
IGNORED = -100  # what transformers leaves out of the loss


class Topics(Dataset[Tensor]):
    """The first bytes of each topic, and of each paragraph in it."""

    def __init__(self, samples: int) -> None:
        texts = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
        self._texts = [text.strip().encode()[:LENGTH] for text in texts if len(text) > 1][:samples]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor(list(self._texts[number]))


def padded(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return a batch as transformers takes it: ids, mask and labels, each (batch, `LENGTH`)."""
    ids = torch.zeros(len(samples), LENGTH, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
        mask[row, : len(sample)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, IGNORED)}


def make(path: str | None) -> Any:
    """Return the model of a directory, or a small one; with random weights."""
    if path:
        settings = AutoConfig.from_pretrained(path)
        settings.use_cache = False
        return AutoModelForCausalLM.from_config(settings)
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def train(model_path: str | None, saved_path: str | None, losses_path: str | None) -> None:
    """Train, write the weights to the directory `saved_path` and the losses to `losses_path`."""
    runtime = msrun.init()
    topics = Topics(GLOBAL_BATCH * STEPS)
    batch_size = GLOBAL_BATCH // runtime.layout.size("dp")
    sample = padded([topics[0]] * batch_size)
    with runtime.init_on_meta():
        model = make(model_path)
    model = runtime.shard(model, sample=sample)
    if model_path:
        runtime.load_pretrained(model, model_path)
    optimizer = runtime.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    losses = []
    for batch in runtime.loader(topics, batch_size, shuffle=True, seed=1, collate_fn=padded):
        losses.append(runtime.step(model, optimizer, batch, max_norm=1.0).item())
        scheduler.step()
        if len(losses) % 10 == 0:
            runtime.print(f"step {len(losses)}/{STEPS}  loss {losses[-1]:.4f}")
    if saved_path:
        runtime.save_pretrained(model, saved_path)
    if losses_path and runtime.is_main:
        Path(losses_path).write_text(json.dumps(losses))


def main() -> None:
    """Train as the arguments say."""
    parser = argparse.ArgumentParser(description="Train a causal language model of transformers.")
    parser.add_argument("--model", help="directory of a pretrained model")
    parser.add_argument("--save", help="directory for the trained model")
    parser.add_argument("--losses", help="file for the losses, as JSON")
    arguments = parser.parse_args()
    train(arguments.model, arguments.save, arguments.losses)


if __name__ == "__main__":
    main()
