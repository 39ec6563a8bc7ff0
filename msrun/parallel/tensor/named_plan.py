"""Makes the rules of `auto_tp`, or of a family of models, for one model.

Where the rules come from, the first that knows a module counts:

1. The model's own plan, `_tp_plan` of transformers (with `auto_tp`).
2. The blocks of `plans.families`: modules with members of known names.
3. The token embedding and the head, as `get_input_embeddings` and `get_output_embeddings` of
   transformers return them.
4. Pairs of `Linear` of one module of which the first widens and the second narrows again (with
   `auto_tp`).

Members of a block are sharded together or not at all.  A block stays whole if a size does not
divide, and attention also if its heads do not.  Nothing here has to be right about the model: the
guard computes what one process does, whatever is sharded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.layout import named_axis
from msrun.parallel.plans.families import AUTO, Block, blocks_of
from msrun.parallel.plans.module_shape import ModuleShape, NamedRules
from msrun.parallel.rank_context import RankContext
from msrun.parallel.settings.plan_rules import Dims, PlanRule

# Styles of transformers -> ours.  Others, such as those of q_norm, need nothing here: what they
# are for follows from the placements of activations.
_OWN_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "vocab",
    "colwise_rep": "vocab",
    "embedding_rowwise": "embedding",
    "moe_tp_experts": "experts",
}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim")
_WITHOUT_HEADS = ("mlp", "moe", "moeblock", "experts", "feedforward", "ffn")  # ends of classes
_SHOWN_MAX = 3


class _Maker:
    """Collects the rules for one model.

    Args:
        name: Name of the plan.
        model: The model.
        shapes: Its modules, by name.
        axis: Mesh axis to shard over.
        size: Its size.
    """

    def __init__(
        self, name: str, model: nn.Module, shapes: Mapping[str, ModuleShape], axis: str, size: int
    ) -> None:
        self.rules: dict[str, PlanRule] = {}
        self.whole: dict[str, list[str]] = defaultdict(list)
        self._model, self._shapes = model, shapes
        self._plan, self._axis, self._size = name, axis, size

    def add_all(self) -> None:
        """Add every block that divides; see the module."""
        if self._plan == AUTO:
            self._add_own()
        known = blocks_of(self._plan)
        for prefix in self._shapes:
            for block in known:
                self._add_known(prefix, block)
        self._add_vocabulary()
        if self._plan == AUTO:
            for prefix in self._shapes:
                self._add_pairs(prefix)

    def _add_own(self) -> None:
        """Add the rules of the model's own plan, all of one module together."""
        blocks: dict[str, dict[str, str]] = defaultdict(dict)
        for prefix, patterns in _own_plans(self._model):
            for name in self._shapes:
                inside = name.removeprefix(f"{prefix}." if prefix else "")
                for pattern, style in patterns.items():
                    if fnmatchcase(inside, pattern) and style in _OWN_STYLES:
                        blocks[name.rpartition(".")[0]].setdefault(name, _OWN_STYLES[style])
        for prefix, members in blocks.items():
            for vocabulary in ("embedding", "vocab"):
                for name in [n for n, style in members.items() if style == vocabulary]:
                    self._add("", {name: members.pop(name)}, has_heads=False)
            self._add(prefix, members, has_heads=_is_attention(self._model, prefix))

    def _add_known(self, prefix: str, block: Block) -> None:
        start = f"{prefix}." if prefix else ""
        members = {start + name: style for name, style in block.members.items()}
        optional = {start + name: style for name, style in block.optional.items()}
        if any(name not in self._shapes or name in self.rules for name in members):
            return
        if any(start + name not in self._shapes for name in block.beside):
            return
        if all(self._base(name) for name in members):
            there = {name: style for name, style in optional.items() if name in self._shapes}
            self._add(prefix, {**members, **there}, has_heads=block.has_heads)

    def _add_vocabulary(self) -> None:
        """Add the token embedding and the head; a weight that both have is sharded for both."""
        for get, style in (
            ("get_input_embeddings", "embedding"),
            ("get_output_embeddings", "vocab"),
        ):
            module = _call(self._model, get)
            names = [name for name, other in self._model.named_modules() if other is module]
            for name in names[:1]:
                kind = "Embedding" if style == "embedding" else "Linear"
                if name not in self.rules and self._base(name) == kind:
                    self._add("", {name: style}, has_heads=False)
        self._complete_shared()

    def _complete_shared(self) -> None:
        """Give all owners of a shared parameter a rule, or none."""
        owners = [n for n, rule in self.rules.items() if rule.style in ("embedding", "vocab")]
        for name in owners:  # those that get a rule here are added: a head shares its bias, too
            others = [other for shared in self._shapes[name].shared.values() for other in shared]
            for other in others:
                owner, _, param = other.rpartition(".")
                if owner in self.rules and self.rules[owner].style:
                    continue
                if self._base(owner) in ("Embedding", "Linear"):
                    style = "embedding" if self._base(owner) == "Embedding" else "vocab"
                    self.rules[owner] = self._rule(style)
                    owners.append(owner)
                else:
                    dims: Dims = [
                        self._axis,
                        *[None] * (len(self._shapes[owner].params[param]) - 1),
                    ]
                    kept = self.rules[owner].params if owner in self.rules else {}
                    self.rules[owner] = PlanRule(match=owner, params={**kept, param: dims})

    def _add_pairs(self, prefix: str) -> None:
        """Add the one pair of `Linear` of a module that widens and narrows again, if there is one.

        Modules of several such pairs stay whole: which of them belong together is not known.
        """
        start = f"{prefix}." if prefix else ""
        linear = {
            start + name: self._weight(start + name)
            for name, _ in self._model.get_submodule(prefix).named_children()
            if self._base(start + name) == "Linear" and start + name not in self.rules
        }
        if len(linear) not in (2, 3) or any(name in self.whole["heads"] for name in linear):
            return
        *first, last = linear
        width, inside = linear[last]
        if inside > width and all(linear[name] == (inside, width) for name in first):
            self._add(prefix, {**dict.fromkeys(first, "colwise"), last: "rowwise"}, has_heads=False)

    def _add(self, prefix: str, members: Mapping[str, str], *, has_heads: bool) -> None:
        """Add rules for `members` if all of them divide."""
        if not members or any(name in self.rules for name in members):
            return
        problem = next(filter(None, (self._problem(*member) for member in members.items())), "")
        if not problem and has_heads:
            problem = self._problem_of_heads(prefix, members)
        if problem:
            for name in members:
                if name not in self.whole[problem]:
                    self.whole[problem].append(name)
            return
        for name, style in members.items():
            self.rules[name] = self._rule(style)

    def _rule(self, style: str) -> PlanRule:
        kind, _, parts = style.partition("/")
        return PlanRule(match="*", style=kind, axis=self._axis, parts=int(parts or 1))  # type: ignore[arg-type]

    def _base(self, name: str) -> str:
        """Return the class whose styles the module takes; that of a LoRA layer is below it."""
        shape = self._shapes.get(name)
        if shape is None or not all(shape.computed.values()):
            return ""
        return self._base(f"{name}.{shape.adapters[0]}") if shape.adapters else shape.base

    def _weight(self, name: str) -> tuple[int, ...]:
        """Return the sizes (out, in) of a linear layer, or (rows, width) of a table."""
        shape = self._shapes[name]
        if shape.adapters:
            return self._weight(f"{name}.{shape.adapters[0]}")
        weight = (shape.params | shape.computed)["weight"]
        return weight[::-1] if shape.base == "Conv1D" else weight

    def _problem(self, name: str, style: str) -> str:
        """Return why the module `name` stays whole; empty if it does not."""
        shape, base = self._shapes[name], self._base(name)
        kind, _, parts = style.partition("/")
        if not base or (kind == "experts") != (base == "Experts"):
            computed = next(iter(shape.computed), None)
            return (
                f"{shape.kind} {f'computes its {computed}' if computed else 'has no known weight'}"
            )
        if shape.computed and parts:
            return f"{shape.kind} computes its {parts} projections"
        if base == "GroupedConv" and kind != "colwise":
            return f"{shape.kind} has groups"
        if base == "GroupedConv":
            size = int(self._model.get_submodule(name).groups)  # type: ignore[arg-type]
        elif kind == "experts":
            size = shape.params["down_proj"][-1]
        elif kind == "rowwise" or (kind == "colwise" and base == "Embedding"):
            size = self._weight(name)[1]
        else:
            size = self._weight(name)[0]
        if size % (self._size * int(parts or 1)):
            return f"{size} does not divide by {self._size * int(parts or 1)}"
        return ""

    def _problem_of_heads(self, prefix: str, members: Mapping[str, str]) -> str:
        """Return why attention stays whole: its heads are not known, or do not divide."""
        module = self._model.get_submodule(prefix)
        heads = _attribute(module, _HEADS)
        width = _attribute(module, _HEAD_WIDTHS)
        key_heads = _attribute(module, _KEY_HEADS) or heads
        columns = [name for name, style in members.items() if style.startswith("colwise")]
        if not columns:
            return ""
        if not width and heads:
            style = members[columns[0]]
            width = self._weight(columns[0])[0] // int(style.partition("/")[2] or 1) // heads
        if not heads and width:
            heads = key_heads = self._weight(columns[0])[0] // width
        if not heads or not width:
            return "the number of heads is not known"
        for count in (heads, key_heads or heads):
            if count % self._size:
                return f"{count} heads do not divide by {self._size}"
        return ""


def named_rules(
    name: str, context: RankContext, model: nn.Module, shapes: Mapping[str, ModuleShape]
) -> NamedRules:
    """Return the rules that a plan that ships has for `model`, and say what it does."""
    axis = named_axis(name, context.layout)
    rules, lines = make_rules(name, model, shapes, axis, context.layout.size(axis))
    if context.layout.size(axis) > 1:
        context.print("\n".join(lines))
    return rules


def make_rules(
    name: str, model: nn.Module, shapes: Mapping[str, ModuleShape], axis: str, size: int
) -> tuple[NamedRules, list[str]]:
    """Return the rules that the plan `name` has for `model`, and lines that say what it does.

    Args:
        name: A name of `PLAN_NAMES`.
        model: The model, unchanged yet.
        shapes: Its modules, by name.
        axis: Mesh axis to shard over.
        size: Size of this axis.

    Raises:
        ModelError: Nothing of the model divides.
    """
    maker = _Maker(name, model, shapes, axis, size)
    maker.add_all()
    whole = [
        f"{_some(left)}: {problem}"
        for problem, names in maker.whole.items()
        if (left := [name for name in names if name not in maker.rules])
    ]
    if not maker.rules and size > 1:
        reason = f" ({'; '.join(whole)})" if whole else ""
        raise ModelError(
            f"{ROOT}.plan: {name} finds nothing in {type(model).__name__} to shard over "
            f"{axis} {size}{reason}",
            hint="write rules for its modules, or choose another mesh",
        )
    styles = Counter(rule.style or "params" for rule in maker.rules.values())
    shown = ", ".join(f"{count} {style}" for style, count in sorted(styles.items()))
    lines = [f"msrun: {name} shards over {axis} {size}: {shown}"]
    lines += [f"msrun: {name} leaves whole: {line}" for line in whole]
    return NamedRules(name=name, rules=maker.rules), lines


def _own_plans(model: nn.Module) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the outermost modules of `model` with a plan of their own, and this plan."""
    seen: list[str] = []
    for name, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in seen)
        if isinstance(plan, Mapping) and plan and not is_inside:
            seen.append(name)
            yield name, {str(key): str(style) for key, style in plan.items()}


def _is_attention(model: nn.Module, prefix: str) -> bool:
    module = model.get_submodule(prefix)
    kind = type(module).__name__.lower()
    # The configuration of the model, which many of its modules have, says nothing about these.
    heads = _attribute(module, _HEADS, has_config=not kind.endswith(_WITHOUT_HEADS))
    return "attention" in kind or bool(heads)


def _attribute(module: nn.Module, names: tuple[str, ...], *, has_config: bool = True) -> int:
    """Return the first of `names` that is a number in the module, a child of it or its config."""
    places: list[Any] = [module, *module.children()]
    for place in [*places, getattr(module, "config", None)] if has_config else places:
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _call(model: nn.Module, method: str) -> nn.Module | None:
    """Return what `method` of a model of transformers gives; None where there is none."""
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) else None


def _some(names: list[str]) -> str:
    shown = ", ".join(name or "the model" for name in names[:_SHOWN_MAX])
    more = len(names) - _SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown
