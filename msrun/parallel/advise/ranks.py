"""One rank of several that share a model, for `simulate`: the runtime's own modules and no ranks.

Operators are divided by the plan that ships for the model (`auto_tp`) or by the rules of a grid,
sequences by style `context`, images by `data`.  All run as in training, among ranks that are not
there.  Experts on ranks of their own
follow from arithmetic, since the tokens that travel depend on values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.advise.rank_work import CountedDivision, RankWork
from msrun.parallel.advise.simulate import Peaks, simulate
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.config_file import read_config
from msrun.parallel.layout import plan_axes
from msrun.parallel.local import local_part
from msrun.parallel.losses.batch import read_batch
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.rank_context import BatchWeight, Rank, RankContext
from msrun.parallel.search.modules.attention import KINDS, AttentionCall
from msrun.parallel.settings.plan_rules import CONTEXT_AXIS, PlanRule
from msrun.parallel.sharded_model import Context, entered
from msrun.parallel.torch_compat import fake_ranks

if TYPE_CHECKING:
    from msrun.parallel.plans.module_shape import ModuleShape, NamedRules

# DTensor keeps what it works out by mesh, groups included.  Under a name that no mesh of a job has,
# nothing of ranks that are not there is found by ranks that are, as in a process that forks them.
_TENSOR_AXIS, _OF_GRID = "advised_tp", "advised_"


def operators_divided(
    model: nn.Module,
    sample: Sequence[Any],
    recomputed: Sequence[str],
    ranks: int,
    *,
    copies: int = 1,
) -> tuple[Peaks, RankWork]:
    """Return what a pass takes on one of `ranks` over which `plan: auto_tp` divides operators.

    Args:
        model: On the device `meta`.
        sample: Of a local batch, or of one of its copies.
        recomputed: Modules that recompute.
        ranks: That share operators.
        copies: Slices of the batch that take turns.

    Raises:
        ModelError: The plan finds nothing to divide, or the model needs values.
    """
    try:
        with fake_ranks(ranks):
            context = first_of({_TENSOR_AXIS: ranks}, plan=["auto_tp"])
            work = RankWork(context.group(_TENSOR_AXIS).group_name)
            division = CountedDivision(Operators(context, ranks), work)
            return simulate(model, sample, recomputed, division, slices=copies), work
    except ModelError as error:
        raise ModelError(error.message.replace(_TENSOR_AXIS, "tp"), hint=error.hint) from None


def grid_divided(
    model: nn.Module, sample: Sequence[Any], axes: Mapping[str, int], config: Mapping[str, Any]
) -> Peaks:
    """Return what a pass takes on one rank of a grid.

    Args:
        model: On the device `meta`.
        sample: Of a local batch, as of `simulate`.
        axes: Axis of the grid -> size.
        config: With the plan that divides the model.

    Raises:
        ModelError: The runtime refuses the plan for the model, or the model needs values.
    """
    mesh = {_OF_GRID + axis: size for axis, size in axes.items()}
    plan = [{**rule, "axes": [_OF_GRID + axis for axis in rule["axes"]]} for rule in config["plan"]]
    ranks = math.prod(axes.values())
    try:
        with fake_ranks(ranks):
            division = Operators(first_of(mesh, plan=plan), ranks, rules=plan)
            peaks = simulate(model, sample, (), division)
    except ModelError as error:
        raise ModelError(error.message.replace(_OF_GRID, ""), hint=error.hint) from None
    return peaks


def images_divided(
    model: nn.Module, sample: Sequence[Any], axes: Mapping[str, int], config: Mapping[str, Any]
) -> Peaks:
    """Return what a pass takes on the largest of the ranks that have parts of images.

    Args:
        model: On the device `meta`.
        sample: Of a local batch, as of `simulate`.
        axes: Axis that divides images -> size.
        config: With the names of the values that are divided.

    Raises:
        ModelError: A function of the model is not known on parts, or the model needs values.
    """
    mesh, data = {DATA_AXIS: 1, **axes}, config["data"]
    ranks = math.prod(axes.values())
    # The first rank has as many rows as any, and the next has neighbours on both sides.
    inner = 0
    for size in axes.values():
        inner = inner * size + (size > 2)  # noqa: PLR2004 - of two ranks each is at an end
    found = []
    for rank in sorted({0, inner}):
        with fake_ranks(ranks, rank):
            context = first_of(mesh, rank=rank, data=data)
            found.append(simulate(model, sample, (), _ImageParts(context, mesh, data, ranks)))
    # Batch norms of parts are part of the pass.
    return max(found, key=lambda one: one.total)._replace(normed=0)


def tokens_divided(
    model: nn.Module,
    sample: Sequence[Any],
    recomputed: Sequence[str],
    ranks: int,
    kind: str = "",
) -> tuple[Peaks, str, float]:
    """Return what a pass takes on one of `ranks` that share each sequence.

    Args:
        model: On the device `meta`.
        sample: Of a local batch, as of `simulate`.
        recomputed: Modules that recompute.
        ranks: That share a sequence.
        kind: Of `KINDS`; empty is the one that sends less.

    Returns:
        The bytes, the kind of attention, and the bytes that it sends.

    Raises:
        ModelError: Sequences do not divide, or the model mixes tokens.
    """
    with fake_ranks(ranks):
        rule = {"match": "*", "style": "context"} | ({"kind": kind} if kind else {})
        division = Tokens(first_of({CONTEXT_AXIS: ranks}, plan=[rule]), rule, ranks)
        peaks = simulate(model, sample, recomputed, division)
    calls = division.attention
    sent = {
        one: sum(call.sent(one, ranks) for call in calls)
        for one in ([kind] if kind else KINDS)
        if all(call.can(one, ranks) for call in calls)
    }
    best = min(sent, key=sent.__getitem__)
    return peaks, best, sent[best]


class _Attentions(TorchFunctionMode):
    """Notes the calls of attention."""

    def __init__(self, calls: list[AttentionCall]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        del types
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            given = (*args, *(kwargs.get(name) for name in ("query", "key")))[:2]
            query, key = map(local_part, given)
            heads = query.shape[1]
            causal = kwargs.get("is_causal", args[5:6] == (True,))
            self._calls.append(
                AttentionCall(heads, key.shape[1], query.nbytes // heads, bool(causal))
            )
        return func(*args, **kwargs)


def first_of(mesh: Mapping[str, int], rank: int = 0, **others: Any) -> RankContext:
    """Return a rank on a mesh of ranks that are not there.

    Args:
        mesh: Axis -> size.
        rank: Its number.
        others: Keys of the configuration beside the mesh.
    """
    config, ranks = read_config({"mesh": dict(mesh), **others}), math.prod(mesh.values())
    one = Rank(rank=rank, world_size=ranks, device=torch.device("cpu"), batch=BatchWeight())
    return one.place(config)


class Operators:
    """Divides operators by the plan that ships, or by rules; a `Division`.

    Args:
        context: Of one rank.
        ranks: Over which it divides.
        axis: Their axis, for the plan that ships.
        apart: Modules that this plan leaves alone.
        rules: Of a plan in its place.
    """

    divides_tokens = False

    def __init__(
        self,
        context: RankContext,
        ranks: int,
        axis: str = _TENSOR_AXIS,
        apart: Collection[str] = (),
        rules: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._context, self.ranks, self._axis, self._apart = context, ranks, axis, apart
        self._mesh = context.root_mesh[plan_axes(context.layout)]
        self._rules = [msgspec.convert(rule, PlanRule) for rule in rules]

    def apply(self, net: nn.Module) -> tuple[Context, Context]:
        """Shard the parameters of `net`, and guard what it computes."""
        from msrun.parallel.tensor import hooks
        from msrun.parallel.tensor.describe import describe_modules
        from msrun.parallel.tensor.plan import plan_modules

        shapes = describe_modules(net)
        rules: list[Any] = [*self._rules] or [self._shipped(net, shapes)]
        plans = plan_modules(rules, self._context.layout, shapes, None)
        guard = hooks.apply(net, plans, self._mesh)
        hooks.watch(net, lambda: None)
        return guard.active_with_loss, guard.active

    def part(self, net: nn.Module, inputs: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return all of the inputs: these ranks have equal batches."""
        batch = read_batch(net, [*inputs, None], has_loss=True)
        return batch.inputs, batch.named

    def _shipped(self, net: nn.Module, shapes: Mapping[str, ModuleShape]) -> NamedRules:
        """Return the rules of the plan that ships, without modules that it leaves alone."""
        from msrun.parallel.tensor.named_plan import make_rules

        plan, _ = make_rules("auto_tp", net, shapes, self._axis, self.ranks)
        for name in plan.rules.keys() & {*self._apart}:
            del plan.rules[name]
        return plan


class Tokens:
    """Divides sequences; a `Division`.

    Args:
        context: Of one rank.
        rule: Of style `context`.
        ranks: Over which it divides.
        inside: What divides the same model over further ranks, as `Division.apply`.
    """

    divides_tokens = True

    def __init__(
        self,
        context: RankContext,
        rule: dict[str, Any],
        ranks: int,
        inside: Callable[[nn.Module], tuple[Context, Context]] | None = None,
    ) -> None:
        self._context, self._rule, self.ranks, self._inside = context, rule, ranks, inside
        self.attention: list[AttentionCall] = []

    def apply(self, net: nn.Module) -> tuple[Context, Context]:
        """Have `net` compute on the tokens of one rank."""
        from msrun.parallel.context.apply import divide

        if self._context.sequence is None:
            raise ModelError("no axis divides sequences")
        rule = PlanRule(**self._rule)
        self._sequences = divide("parallel.plan[0]", rule, self._context.sequence, net)
        sequences = self._sequences
        calls = partial(_Attentions, self.attention)
        inside, again = self._inside(net) if self._inside else (contextlib.nullcontext,) * 2
        computing = partial(entered, [sequences.active, inside, sequences.watched, calls])
        return computing, partial(entered, [sequences.repeated, again])

    def part(self, net: nn.Module, inputs: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the tokens of the first rank."""
        batch = read_batch(net, [*inputs, None], has_loss=True)
        part = self._sequences.cut(net, batch)
        self._sequences.begin(part)
        return part.inputs, part.named


class _ImageParts:
    """Divides images; a `Division`."""

    divides_tokens = False

    def __init__(
        self, context: RankContext, mesh: Mapping[str, int], data: dict[str, Any], ranks: int
    ) -> None:
        self._context, self.ranks = context, ranks
        self._config = read_config({"mesh": dict(mesh), "data": data})

    def apply(self, net: nn.Module) -> tuple[Context, Context]:
        """Have `net` compute on the parts of one rank."""
        from msrun.parallel.images.apply import divide_images

        self._images = divide_images(self._config, self._context, net)
        return self._images.active, contextlib.nullcontext

    def part(self, net: nn.Module, inputs: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the parts of the rank."""
        part = self._images.cut(net, read_batch(net, [*inputs, None], has_loss=True))
        return part.inputs, part.named


def expert_rules(names: Sequence[str]) -> list[dict[str, str]]:
    """Return the rules of the plan for modules of experts, by the last part of their names."""
    lasts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    patterns = [f"*.{last}" if f"{last}" not in names else last for last in lasts]
    return [{"match": one, "style": "experts", "axis": EXPERT_AXIS} for one in patterns]
