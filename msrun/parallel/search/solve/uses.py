"""Who reads which tensor of a program, with views folded away and constants laid out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from msrun.parallel.search.graph.axis_placement import PR, RR, IntArray
from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.rules import ShardingRule, Site
from msrun.parallel.search.graph.views import DimMap, dim_map
from msrun.parallel.search.solve.problem import Setting


class Use(msgspec.Struct, frozen=True):
    """One use of a tensor.

    Args:
        step: Who reads; None is the model's output.
        port: Number of the step's input.
    """

    step: Step | None
    port: int


class Uses:
    """What a program's steps read.

    Args:
        program: The forward pass.
        setting: Mesh, and how batches come.
        rules: Rule of each step.

    Attributes:
        constants: Values that no parameter has a part in.
        layouts: The one layout of each constant, (1, axes).
        views: View -> the tensor behind it, and how its dims are named.
        uses: Tensor -> who reads it or a view of it; constants have none.
    """

    def __init__(
        self, program: Program, setting: Setting, rules: Mapping[str, ShardingRule]
    ) -> None:
        self._program, self._setting, self._rules = program, setting, rules
        self.constants = program.constants()
        self.layouts: dict[str, IntArray] = {
            name: self._batch(name) for name in program.values if name in self.constants
        }
        self.views: dict[str, tuple[str, DimMap]] = {}
        self.uses: dict[str, list[Use]] = {}
        for step in program.steps:
            self._add(step)
        for name in program.outputs:
            self._read(name, None, 0)

    def base_of(self, name: str) -> tuple[str, DimMap | None]:
        """Return the tensor behind `name`, and how a reader of `name` names its dims."""
        return self.views.get(name, (name, None))

    def _add(self, step: Step) -> None:
        view = dim_map(Site(step, self._program))
        if self.constants.issuperset(step.outputs):
            self._derive(step, view)
        elif view is not None:
            (source,) = step.inputs.values()
            root, earlier = self.base_of(source)
            self.views[step.outputs[0]] = (root, view.after(earlier) if earlier else view)
        else:
            for port, name in enumerate(step.inputs.values()):
                self._read(name, step, port)

    def _read(self, name: str, step: Step | None, port: int) -> None:
        root, _ = self.base_of(name)
        if root not in self.constants:
            self.uses.setdefault(root, []).append(Use(step, port))

    def _batch(self, name: str) -> IntArray:
        """Return the layout of an input: cut by sample over the axes that divide the batch."""
        sizes = self._setting.sizes
        codes = [RR] * len(sizes)
        shape = self._program.values[name].shape
        if name in self._program.inputs and shape and shape[0] == self._setting.batch:
            left = shape[0]
            for axis in sorted(self._setting.data_axes):
                if left % sizes[axis] == 0:
                    left //= sizes[axis]
                    codes[axis] = 0
        return np.array([codes])

    def _derive(self, step: Step, view: DimMap | None) -> None:
        """Give what is made of constants the layout that costs nothing, if there is one."""
        given = [self.layouts[name][0].tolist() for name in step.inputs.values()]
        axes = range(len(self._setting.sizes))
        if view is not None and given:
            back = {source: dim for dim, (source, _) in view.dims.items()}
            self.layouts[step.outputs[0]] = np.array([[back.get(given[0][m], RR) for m in axes]])
            return
        by_ins = {choice.ins: choice.outs for choice in self._rules[step.name].choices}
        found = [by_ins.get(tuple(codes[m] for codes in given)) for m in axes]
        fits = bool(given) and all(outs is not None and PR not in outs for outs in found)
        for port, name in enumerate(step.outputs):
            row = [outs[port] if fits and outs else RR for outs in found]
            self.layouts[name] = np.array([row])
