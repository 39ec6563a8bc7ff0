"""What mixes samples in a traced forward: the rules of `losses.sample_dims` on its steps.

A plan has the samples of all ranks, so a mean over them is that of one process.  A micro-batch has
a part of them.  The graph has operators of torch and no values, and what they got is known, so that
nothing has to run.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from msrun.parallel.local import takes_gradients
from msrun.parallel.losses.calls.marks import Known, Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.guesses import guess, marks_of_values
from msrun.parallel.losses.pairs.input_pairs import outcome_of
from msrun.parallel.losses.sample_dims import result_of

# Operators that have another name than the function of torch.
_NAMES = {
    "cross_entropy_loss": "cross_entropy",
    "linalg_vector_norm": "vector_norm",
    "_to_copy": "to",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
}
# Losses of each element: the place of `reduction` in their arguments, which is a mean unless given.
_OF_ELEMENTS = {"mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2}
_MEAN = 1
_KEEPING = ("alias", "clone", "to", "view", "neg", "detach")
_LINEAR = ("add", "sub", "mul", "div")
# What takes or moves indices of one dim, the second argument, which is the first dim unless given.
_TAKING = frozenset(["slice", "select", "narrow", "unbind", "index_select", "gather", "index"])
_TAKING |= {"chunk", "split", "split_with_sizes", "tensor_split", "cat", "stack", "flip", "roll"}
# Their result has some samples, and no dim with all of them.
_CHOOSING = frozenset(["index", "masked_select", "take", "select", "unbind"])
# A step, and which of its results.
_Key = tuple[str, int]


def known_values(
    graph: fx.Graph, batch: Collection[str], names: Sequence[str], samples: int
) -> tuple[Known, ...]:
    """Return what is known of the values `names` of a graph.

    Args:
        graph: The forward.
        batch: The inputs of the model.
        names: Nodes.
        samples: In a batch.
    """
    found: dict[_Key, Known] = {}
    for node in graph.nodes if samples > 1 else ():
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in batch and _is_batch(value, samples):
            found[node.name, 0] = Known(Mark(0))
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            if (known := found.get((source.name, index))) is not None:
                found[node.name, 0] = known
        elif node.op == "call_function":
            _follow(node, found, samples)
    return tuple(found.get((name, 0), Known()) for name in names)


def are_means(graph: fx.Graph, names: Collection[str]) -> bool:
    """Return whether all numbers among the values `names` of a graph are means of their parts'.

    They are means over elements, of which equal parts have equally many, and what is linear in such
    means.  A cross entropy is none: the targets that it ignores are seen in values alone.  Nor is
    what depends on indices of the first dim, which may be those of samples.
    """
    if any(_takes_samples(node) for node in graph.nodes if node.op == "call_function"):
        return not any(_is_number(node) for node in graph.nodes if node.name in names)
    return all(_is_mean(node) for node in graph.nodes if node.name in names and _is_number(node))


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.dim()


def _takes_samples(node: fx.Node) -> bool:
    """Return whether a step takes or moves indices of the first dim, or of several."""
    if _name(node) not in _TAKING:
        return False
    if _name(node) in ("index", "flip", "roll"):
        return True
    if _name(node) in ("split", "split_with_sizes", "chunk", "tensor_split"):
        return not (*node.args[2:], node.kwargs.get("dim", 0))[0]
    if _name(node) == "slice":
        # All of a dim, as in `x[:, 1:]`: an end that is as large in the sample has another meaning.
        start, end = [*node.args[2:4], None, None][:2]
        if not start and end in (None, sys.maxsize):
            return False
    return not (*node.args[1:], node.kwargs.get("dim", 0))[0]


def _is_mean(node: Any) -> bool:
    """Return whether a step or number is the mean of those of equal parts."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int | float)
    name, args = (_name(node), node.args) if node.op == "call_function" else ("", ())
    if name in _OF_ELEMENTS:
        reduction = (*args[_OF_ELEMENTS[name] :], node.kwargs.get("reduction", _MEAN))[0]
        return bool(reduction == _MEAN)
    if name in _LINEAR and not node.kwargs:
        numbers = [one for one in args if not isinstance(one, fx.Node)]
        is_scaled = len(numbers) == 1 and (name == "mul" or numbers == [*args[1:]])
        return all(map(_is_mean, args)) and (is_scaled if name in ("mul", "div") else not numbers)
    return (name == "mean" and len(args) == 1) or (name in _KEEPING and _is_mean(args[0]))


def _is_batch(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples


def _follow(node: fx.Node, found: dict[_Key, Known], samples: int) -> None:
    """Add what is known of the results of a step."""
    sources = [(one, found[one.name, 0]) for one in node.all_input_nodes if (one.name, 0) in found]
    if not sources:
        return
    marks = {id(one.meta["val"]): known.mark for one, known in sources if known.mark}
    mixture = next((known.mixture for _, known in sources if known.mixture), None)
    value = node.meta.get("val")
    args = fx.map_arg(node.args, lambda one: one.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda one: one.meta["val"])
    for index, result in enumerate(value if isinstance(value, tuple | list) else [value]):
        if not isinstance(result, Tensor):
            continue
        call = TorchCall(_name(node), args, kwargs, result, marks, samples, place=_place(node))
        outcome = outcome_of(call, _result) if marks else None
        if outcome is None and _may_be_guessed(call):
            outcome = guess(result, marks_of_values(call), samples, call.name)
        own = outcome if isinstance(outcome, Mixture) else None
        reached = (mixture or own) if takes_gradients(result) else None
        known = Known(outcome if isinstance(outcome, Mark) else None, reached)
        if known != Known():
            found[node.name, index] = known


def _result(call: TorchCall) -> Outcome:
    rule = _RULES.get(call.name)
    return rule(call) if rule else result_of(call)


def _may_be_guessed(call: TorchCall) -> bool:
    is_chosen = call.name in _CHOOSING
    return takes_gradients(call.result) and call.result.dim() > 0 and not is_chosen


def _name(node: fx.Node) -> str:
    target = str(node.target)
    packet = target.split(".")[1] if "." in target else target
    return _NAMES.get(packet, packet if packet.endswith("__") else packet.removesuffix("_"))


def _place(node: fx.Node) -> str:
    """Return the module of a step; its line is not noted, as that would take long."""
    stack = node.meta.get("nn_module_stack") or {}
    modules = [name for name, _ in stack.values() if name]
    return f" (in {modules[-1]})" if modules else ""


def _embedding(call: TorchCall) -> Outcome:
    """`embedding(weight, indices)`: the function of torch has them the other way round."""
    return call.mark(call.value(1, "indices"))


def _sliced(call: TorchCall) -> Outcome:
    """`slice(x, dim, start, end, step)`."""
    mark = call.mark(call.x)
    if mark is None or mark.dim is None or mark.dim != call.value(1, "dim", 0) % call.x.dim():
        return mark
    return mark if call.result.shape == call.x.shape else None


def _selected(call: TorchCall) -> Outcome:
    """`select(x, dim, index)`."""
    mark, at = call.mark(call.x), call.value(1, "dim", 0) % call.x.dim()
    if mark is None or mark.dim is None:
        return mark
    return None if mark.dim == at else Mark(mark.dim - (at < mark.dim), mark.statistic)


_RULES: Mapping[str, Callable[[TorchCall], Outcome]] = {
    "embedding": _embedding,
    "slice": _sliced,
    "select": _selected,
    "alias": lambda call: call.mark(call.x),
    "lift_fresh_copy": lambda call: call.mark(call.x),
}
