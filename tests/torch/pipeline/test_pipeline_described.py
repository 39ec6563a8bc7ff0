"""What a person is told of a pipeline before its first step."""

import pytest
import torch
import torch.distributed as dist
from pipelines import pipeline, split
from ranks import run_warm

pytestmark = pytest.mark.torch


def _described(model, where, schedule, sample):
    return split(model, pipeline(where, schedule, 8), sample=sample).describe()


def test_a_person_is_told_what_is_where():
    layers = {f"layers.{index}": index // 4 for index in range(8)}
    text = (
        "pipeline 1f1b: S = 2 stages, M = 8 micro-batches, ranks wait 11% of the time = "
        "(S - 1) / (M + S - 1)\n"
        "  stage 0: layers.0, layers.1, layers.2, layers.3; 4.2 KiB of parameters; "
        "at most 2 micro-batch(es) live\n"
        "  stage 1: layers.4, layers.5, layers.6, layers.7; 4.2 KiB of parameters; "
        "at most 1 micro-batch(es) live"
    )

    assert run_warm(_described, 2, "deep", layers, "1f1b", None) == [text] * 2


def test_a_person_is_told_how_auto_decided():
    x = torch.zeros(2, 16)

    assert run_warm(_described, 2, "deep", "auto", "zbv", (x,))[0] == (
        "pipeline zbv: S = 2 stages of V = 2 segments, M = 8 micro-batches, "
        "ranks wait 2% of the time; cut by flops\n"
        "  stage 0: layers.0, layers.1 | layers.6, layers.7; 4.2 KiB of parameters; "
        "at most 4 micro-batch(es) live\n"
        "  stage 1: layers.2, layers.3 | layers.4, layers.5; 4.2 KiB of parameters; "
        "at most 4 micro-batch(es) live"
    )


def _described_for(model, where, schedule, inputs):
    """Return what is printed for a batch, and what a chunk really leaves for its backward."""
    part = split(model, pipeline(where, schedule, 8))
    text = part.describe(inputs)
    own = {param.untyped_storage().data_ptr() for param in part.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage
        return tensor

    chunk = dist.get_rank()
    received = [torch.zeros(2, 16, requires_grad=True)] if chunk else []
    pieces = [*(x[:2].clone() for x in inputs), *received]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        part(*pieces, pipeline_chunk=chunk)
    return text, sum(s.nbytes() for place, s in found.items() if place not in own)


def test_a_person_is_told_the_bytes_of_activations():
    layers = {f"layers.{index}": index // 4 for index in range(8)}
    (text, first), (other, second) = run_warm(
        _described_for, 2, "deep", layers, "1f1b", (torch.zeros(16, 16),)
    )

    # Of two samples: what the first layer gets, and what each relu yields.
    assert first == second == 5 * 2 * 16 * 4
    assert text == other
    lines = text.splitlines()
    assert lines[1].endswith("at most 2 micro-batch(es) live, up to 1.2 KiB of activations")
    assert lines[2].endswith("at most 1 micro-batch(es) live, up to 640 B of activations")


def test_activations_that_need_values_are_left_out():
    (text, _), _ = run_warm(
        _described_for, 2, "routed", {"a": 0, "route": 1, "head": 1}, "1f1b", (torch.zeros(16, 16),)
    )

    assert text.endswith("at most 1 micro-batch(es) live")
