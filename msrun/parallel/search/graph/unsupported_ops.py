"""Operators whose results on shards would differ from those of one process: they are refused."""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import ModelError
from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.graph.views import dim_map

# They draw random numbers: shards would give others.
_REFUSED = """
    bernoulli binomial cauchy exponential geometric log_normal multinomial
    normal poisson rand rand_like randint randint_like randn randn_like randperm random uniform
    _standard_gamma _sample_dirichlet rrelu rrelu_with_noise alpha_dropout feature_dropout
    feature_alpha_dropout native_dropout _fused_dropout
"""
REFUSED = frozenset(_REFUSED.split())
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
        what = packet if packet.removesuffix("_") in REFUSED else ""
        if packet == "instance_norm" and "running_mean" in step.inputs:
            what = "instance_norm with running statistics"
        if float(step.attrs.get("dropout_p", 0.0)) > 0 or (
            packet in _RECURRENT and float(step.attrs.get("dropout", 0.0)) > 0
        ):
            what = f"{packet} with dropout"
        if writes(packet) and bases[0] in read:
            what = f"{packet} on a tensor that a later step reads"
        if what:
            where = step.module or "the model"
            raise ModelError(f"parallel.mode: auto cannot run {what}, as {where} does")
        read.update(bases)


def _base(name: str, program: Program, producers: Mapping[str, Step]) -> str:
    """Return the tensor that `name` is a view of, or itself."""
    while name in producers and dim_map(Site(producers[name], program)) is not None:
        (name,) = producers[name].inputs.values()
    return name


def writes(packet: str) -> bool:
    """Return whether an operator changes its first input."""
    return packet.endswith("_") and not packet.endswith("__")
