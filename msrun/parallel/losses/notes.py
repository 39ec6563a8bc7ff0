"""What watches note at tensors: attributes of plain numbers, text and tuples.

A table of tensors would keep them all in memory.  Attributes go with a tensor into a file, such as
one of outputs that a script keeps, and `torch.load` reads no classes of ours.  A tensor may come
back from a file to another job, whose watches have other numbers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from msrun.parallel.local import is_sharded
from msrun.parallel.torch_compat import local_tensor, passes_straight, write_count

_BITS = 62
_SOURCE = "msrun_source"
# Of tensors, in the first step: where they have samples, and what mixed these before.
SAMPLES, MIXTURE = "msrun_samples", "msrun_mixture"
# Nodes of functions that return what they get in new tensors, without notes: of `fully_shard`,
# torch's reducer, DTensor, `tensor.placements` in place of it, and `tensor.hooks`.
PASSING = frozenset(
    [
        "RegisterPostBackwardFunctionBackward",
        "_DDPSinkBackward",
        "_FromTorchTensorBackward",
        "_ToTorchTensorBackward",
        "RedistributeBackward",
        "_OnMeshBackward",
        "_PartOfBackward",
        "_PartsBackward",  # each in the place of the one that it is of
        "_GatheredBackward",
        "_OwnedBackward",
        "_NumberBackward",
        "_AttachedBackward",
    ]
)


def watch_numbers() -> Iterator[int]:
    """Return numbers for watches, which no other job has."""
    return itertools.count(secrets.randbits(_BITS))


def grad_fn_of(tensor: Tensor) -> Any:
    """Return the node of autograd that `tensor` comes from; None without one.

    A view that was made without gradients has none either; once its base was written, torch fails.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def hand_on(source: Tensor, result: Tensor) -> None:
    """Note that `result`, which a layer computed from `source` in parts, keeps its samples."""
    if (node := grad_fn_of(result)) is not None:
        metadata_of(node)[_SOURCE] = source


def source_of(node: Any) -> Tensor | None:
    """Return the tensor that was handed on as the result of `node`."""
    found: Tensor | None = node.metadata.get(_SOURCE) if node else None
    return found


def leave(tensor: Tensor, key: str, noted: Any) -> None:
    """Note something at a tensor, and at the node of autograd that it comes from."""
    setattr(tensor, key, noted)
    if (node := grad_fn_of(tensor)) is not None:
        metadata_of(node)[key, tensor.output_nr] = noted


def metadata_of(node: Any) -> dict[Any, Any]:
    """Return what anybody notes at a node of autograd; torch declares it as a method."""
    found: dict[Any, Any] = node.metadata
    return found


def note_of_all_ranks(tensor: Tensor) -> None:
    """Note that `tensor` has values of all ranks, of which no part of the batch has others."""
    setattr(tensor, SAMPLES, (None, 0))
    vars(tensor).pop(MIXTURE, None)


def copy_notes(source: Tensor, result: Tensor) -> None:
    """Note of `result`, which takes the place of `source`, what is known of that."""
    if (noted := getattr(source, SAMPLES, None)) is not None:
        leave(result, SAMPLES, (noted[0], write_count(result), *noted[2:]))
    if (mixture := getattr(source, MIXTURE, None)) is not None:
        setattr(result, MIXTURE, mixture)


def carried(tensor: Tensor, key: str) -> Any:
    """Return what was noted of a tensor that was passed on in another one; None without it."""
    node: Any = grad_fn_of(tensor)
    place = tensor.output_nr
    if node is None and is_sharded(tensor):  # of the batch, or computed from it alone
        local = local_tensor(tensor)
        # The rows that another rank has were not left out by anybody.
        return getattr(local, key, None) if local.shape[:1] == tensor.shape[:1] else None
    while node:
        if (source := source_of(node)) is not None:
            return getattr(source, key, None) or carried(source, key)
        if node.name() not in PASSING or place >= len(node.next_functions):
            return None
        node, place = node.next_functions[place]
        if node and (noted := node.metadata.get((key, place))):
            return noted
        if (leaf := getattr(node, "variable", None)) is not None:  # such as of the batch
            return getattr(leaf, key, None)
    return None


def is_passed(node: Any) -> bool:
    """Return whether the function of `node` handed a tensor on that is no parameter."""
    is_passing = False
    while node and node.name() in PASSING:
        node, is_passing = node.next_functions[0][0], True
    return is_passing and not isinstance(getattr(node, "variable", None), Parameter)


def graph_of(loss: Tensor) -> set[Any]:
    """Return the nodes of autograd that `loss` was computed by, as `node_of` has them."""
    seen: set[Any] = set()
    waiting: list[tuple[Any, int]] = [(grad_fn_of(loss), loss.output_nr)]
    while waiting:
        step, output = waiting.pop()
        node = node_of(step, output)
        if step is None or node in seen:
            continue
        seen.add(node)
        before = step.next_functions
        waiting.extend(before if node is step else before[output : output + 1])
    return seen


def node_of(step: Any, output: int) -> Any:
    """Return a node of autograd, with its output if it only joins tensors of different origin."""
    return (step, output) if passes_straight(step) else step
