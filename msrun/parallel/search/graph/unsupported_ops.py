"""Operators whose results on shards would differ from those of one process: they are refused."""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import ModelError
from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.random_ops import base_name
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.graph.views import dim_map

# They draw random numbers inside: shards would give others.
_OTHER_MODE = "choose a configuration without mode: auto"
_HINTS = {
    "native_dropout": "call torch.nn.functional.dropout",
    "_fused_dropout": "call torch.nn.functional.dropout",
    "_sample_dirichlet": _OTHER_MODE,
    "rrelu_with_noise": "call torch.nn.functional.rrelu",
}
REFUSED = frozenset(_HINTS)
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def check(program: Program) -> None:
    """Refuse steps that cannot give the single-process result on shards.

    Raises:
        ModelError: There is one.
    """
    producers = {name: step for step in program.steps for name in step.outputs}
    read = {_base(name, program, producers) for name in program.outputs}
    for step in reversed(program.steps):
        packet = step.packet
        bases = [_base(name, program, producers) for name in step.inputs.values()]
        what, hint = "", _OTHER_MODE
        if base_name(packet) in REFUSED:
            what, hint = packet, _HINTS[base_name(packet)]
        if step.attrs.get("generator") is not None:
            what, hint = f"{packet} with a generator of its own", "draw without generator="
        if packet == "instance_norm" and "running_mean" in step.inputs:
            what = "instance_norm with running statistics"
        if packet in _RECURRENT and float(step.attrs.get("dropout", 0.0)) > 0:
            what = f"{packet} with dropout"
            hint = "put nn.Dropout between modules of one layer each"
        if writes(packet) and bases[0] in read:
            what = f"{packet} on a tensor that a later step reads"
        if what:
            where = step.module or "the model"
            raise ModelError(f"parallel.mode: auto cannot run {what}, as {where} does", hint=hint)
        read.update(bases)


def _base(name: str, program: Program, producers: Mapping[str, Step]) -> str:
    """Return the tensor that `name` is a view of, or itself."""
    while name in producers and dim_map(Site(producers[name], program)) is not None:
        (name,) = producers[name].inputs.values()
    return name


def writes(packet: str) -> bool:
    """Return whether an operator changes its first input."""
    return packet.endswith("_") and not packet.endswith("__")
