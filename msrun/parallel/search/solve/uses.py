"""Consumers of each tensor of a program, with views folded away and constants placed.

A problem of one node for every aten operator would be several times as large as what there is to
choose.  Two kinds of values take no part in the search:

- A view only names the dims of its base anew.  Who reads a view is a consumer of the base, with
  dims translated, so the graph has one tensor where the traced forward has a chain of them.
- A constant depends on no parameter: masks, position tables, the inputs of a batch.  Its layout is
  fixed here, by rules that need no search: inputs are sharded by sample over the axes that divide
  the batch, and what is computed from constants takes the placement that needs no communication,
  or else is replicated.  Consumers pay for redistributing it, but it is no node.  Masks and tables
  are read in every layer; as nodes they would tie all layers together and make the graph wide.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from msrun.parallel.search.graph.axis_placement import PR, RP, RR, IntArray
from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.rules import ShardingRule, Site
from msrun.parallel.search.graph.views import DimMap, dim_map
from msrun.parallel.search.solve.problem import Setting

# What divides samples sums its statistics over ranks, which nothing does for a constant.
_BY_ALL_SAMPLES = "batch_norm"


class Use(msgspec.Struct, frozen=True):
    """One use of a tensor.

    Args:
        step: The consumer; None is the model's output.
        port: Number of the step's input.
    """

    step: Step | None
    port: int


class Uses:
    """Consumers of each tensor of a program.

    Args:
        program: The forward pass.
        setting: Mesh, and how batches come.
        rules: Rule of each step.

    Attributes:
        constants: Values that depend on no parameter.
        layouts: The one layout of each constant, (1, axes).
        views: View -> its base, and which dim of the base each of its dims is.
        uses: Tensor -> uses of it and of its views; constants have none.
    """

    def __init__(
        self, program: Program, setting: Setting, rules: Mapping[str, ShardingRule]
    ) -> None:
        self._program, self._setting, self._rules = program, setting, rules
        self.constants = program.constants()
        self.layouts: dict[str, IntArray] = {
            name: self._given_layout(name) for name in program.values if name in self.constants
        }
        self.views: dict[str, tuple[str, DimMap]] = {}
        self.uses: dict[str, list[Use]] = {}
        for step in program.steps:
            self._add(step)
        for name in program.outputs:
            self._add_use(name, None, 0)

    def base_of(self, name: str) -> tuple[str, DimMap | None]:
        """Return the tensor that `name` is a view of, and the dims of the view; or itself."""
        return self.views.get(name, (name, None))

    def _add(self, step: Step) -> None:
        view = dim_map(Site(step, self._program))
        if self.constants.issuperset(step.outputs):
            self._place_constant(step, view)
        elif view is not None:
            (source,) = step.inputs.values()
            base, earlier = self.base_of(source)
            self.views[step.outputs[0]] = (base, view.after(earlier) if earlier else view)
        else:
            for port, name in enumerate(step.inputs.values()):
                self._add_use(name, step, port)

    def _add_use(self, name: str, step: Step | None, port: int) -> None:
        base, _ = self.base_of(name)
        if base not in self.constants:
            self.uses.setdefault(base, []).append(Use(step, port))

    def _given_layout(self, name: str) -> IntArray:
        """Return the layout of an input: sharded by sample over the axes that divide the batch."""
        sizes = self._setting.sizes
        codes = [RR] * len(sizes)
        shape = self._program.values[name].shape
        if name in self._program.inputs and shape and shape[0] == self._setting.batch:
            left = shape[0]
            for axis in sorted(self._setting.data_axes):
                if sizes[axis] > 1 and left % sizes[axis] == 0:
                    left //= sizes[axis]
                    codes[axis] = 0
        return np.array([codes])

    def _place_constant(self, step: Step, view: DimMap | None) -> None:
        """Give what is made of constants the layout without communication; else replicate it."""
        given = [self.layouts[name][0].tolist() for name in step.inputs.values()]
        axes = range(len(self._setting.sizes))
        if view is not None and given:
            # A view of a constant keeps the shards that it can pass on.
            view_dims = {source: dim for dim, (source, _) in view.dims.items()}
            codes = [view_dims.get(given[0][m], RR) for m in axes]
            self.layouts[step.outputs[0]] = np.array([codes])
            return
        # The choice that reads the inputs as they are, on each axis; partial sums are not wanted.
        # Constants have no gradient, so one that is replicated may be broadcast to shards.
        by_ins = {choice.ins: choice.outs for choice in self._rules[step.name].choices}
        broadcast = {
            tuple(RR if code == RP else code for code in ins): outs for ins, outs in by_ins.items()
        }
        by_ins = broadcast | by_ins
        outs_of = [by_ins.get(tuple(codes[m] for codes in given)) for m in axes]
        fits = bool(given) and all(outs is not None and PR not in outs for outs in outs_of)
        fits &= step.packet != _BY_ALL_SAMPLES
        for port, name in enumerate(step.outputs):
            row = [outs[port] if fits and outs else RR for outs in outs_of]
            self.layouts[name] = np.array([row])
