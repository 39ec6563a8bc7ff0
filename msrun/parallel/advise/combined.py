"""One rank of several that share operators, and experts or sequences beside them.

Operators are divided over `tp` by the plan that ships (`auto_tp`), as in `ranks`; the two divisions
of a model work on each other's results as in training, so one pass has both.  Experts follow from
arithmetic: every rank of `tp` sends the tokens to the experts of its own coordinate, so the plan
leaves these modules alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import nn

from msrun.errors import ModelError
from msrun.parallel.advise.rank_work import CountedDivision, RankWork
from msrun.parallel.advise.ranks import Operators, Tokens, first_of
from msrun.parallel.advise.simulate import Peaks, Undivided, simulate
from msrun.parallel.advise.techniques import Divisible, Technique, divided
from msrun.parallel.config import DATA_AXIS, TENSOR_AXIS
from msrun.parallel.rank_context import RankContext
from msrun.parallel.search.modules.attention import AttentionCall
from msrun.parallel.settings.plan_rules import CONTEXT_AXIS
from msrun.parallel.torch_compat import fake_ranks


class CombinedPass(NamedTuple):
    """What one pass of a rank takes.

    Args:
        peaks: Bytes.
        work: What it computes, and sends over `tp`.
        attention: Calls of attention, if it shares sequences.
    """

    peaks: Peaks
    work: RankWork
    attention: Sequence[AttentionCall] = ()


def combined(model: Divisible) -> Iterator[Technique]:
    """Yield what to try that divides operators, and experts or sequences beside them."""
    for tp in range(2, min(model.world // 2, model.per_node) + 1):
        if model.world % tp:
            continue
        for one in divided(msgspec.structs.replace(model, world=model.world // tp)):
            if one.ep * one.cp > 1:
                yield msgspec.structs.replace(one, tp=tp)


def combined_pass(
    model: nn.Module,
    sample: Sequence[Any],
    recomputed: Sequence[str],
    one: Technique,
    experts: Collection[str],
) -> CombinedPass:
    """Return what a pass of `one` takes, which divides operators beside experts or sequences.

    Args:
        model: On the device `meta`.
        sample: Of a local batch.
        recomputed: Modules that recompute.
        one: The technique.
        experts: Names of modules of experts.

    Raises:
        ModelError: The plan finds nothing to divide, or the model mixes tokens.
    """
    axis = _axis(one)
    mesh = {DATA_AXIS: 1, CONTEXT_AXIS: one.cp, axis: one.tp}
    rules: list[Any] = ["auto_tp", _context_rule(one)] if one.cp > 1 else ["auto_tp"]
    try:
        with fake_ranks(one.cp * one.tp), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks of the job will say it, if it is chosen
            sizes = {name: size for name, size in mesh.items() if size > 1}
            context = first_of(sizes, plan=rules)
            run = partial(_run, context, model, sample, recomputed, one, experts)
            # DTensor runs an operator on whole tensors to know the result, once for each of these
            # shapes: a second pass has what ranks compute alone.
            run()
            return run()
    except ModelError as error:
        raise ModelError(error.message.replace(axis, TENSOR_AXIS), hint=error.hint) from None


def _context_rule(one: Technique) -> dict[str, Any]:
    return {"match": "*", "style": "context", "kind": one.kind or "auto"}


def _axis(one: Technique) -> str:
    """Return a name for the axis `tp`.

    DTensor keeps what it works out by mesh, groups included, so each mesh has a name of its own.
    """
    return f"advised_tp_of_{one.cp}"


def _run(  # noqa: PLR0917 - as of `combined_pass`
    context: RankContext,
    model: nn.Module,
    sample: Sequence[Any],
    recomputed: Sequence[str],
    one: Technique,
    experts: Collection[str],
) -> CombinedPass:
    axis, apart = _axis(one), [*experts] if one.ep > 1 else []
    operators = Operators(context, one.tp, axis, apart)
    work = RankWork(context.group(axis).group_name)
    if one.cp == 1:
        peaks = simulate(model, sample, recomputed, CountedDivision(operators, work), routed=apart)
        return CombinedPass(peaks, work)
    tokens = Tokens(context, _context_rule(one), one.cp, operators.apply)
    peaks = simulate(model, sample, recomputed, CountedDivision(tokens, work))
    return CombinedPass(peaks, work, tokens.attention)


def whole_work(model: nn.Module, sample: Sequence[Any], recomputed: Sequence[str]) -> RankWork:
    """Return what a rank that shares nothing computes."""
    work = RankWork()
    simulate(model, sample, recomputed, CountedDivision(Undivided(), work))
    return work
