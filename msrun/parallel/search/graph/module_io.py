"""What a module of the model reads and makes, as values of a program.

A program has steps, each with the innermost module that runs it, and views between them.  A wish
for a module's input or output is one for a value: the one that its steps read from outside, or the
one that others read of what they make.  Both may be read through views, whose dims have other
numbers; `Read.code` translates a placement to what a consumer reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.graph.views import DimMap, dim_map


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """One step that reads a value, or a view of it.

    Args:
        step: The consumer.
        port: Number of its input.
        view: Dims of what it reads; None as the value itself has them.
    """

    step: Step
    port: int
    view: DimMap | None = None

    def code(self, dim: int, parts: int) -> int | None:
        """Return the dim in which the consumer reads shards of `dim`; None where a view ends them.

        Args:
            dim: Of the value.
            parts: Shards of that dim.
        """
        if self.view is None:
            return dim
        found = [
            own
            for own, (source, limit) in self.view.dims.items()
            if source == dim and limit % parts == 0
        ]
        return found[0] if found else None


class ModuleIO:
    """Inputs and outputs of the modules of a program.

    Args:
        program: The forward pass.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._constants = program.constants()
        self._views = {
            step.outputs[0]: (next(iter(step.inputs.values())), view)
            for step in program.steps
            if (view := dim_map(Site(step, program))) is not None
        }

    def inputs(self, module: str) -> list[str]:
        """Return the values that `module` reads from outside, in the order of their first use.

        Parameters are none of them; values that depend on no parameter, such as masks, only where
        there is nothing else.
        """
        made = {name for step in self.steps(module) for name in step.outputs}
        found = [
            name
            for step in self.steps(module)
            for name in step.inputs.values()
            if name not in made and name not in self._program.params
        ]
        computed = [name for name in found if name not in self._constants]
        given = [name for name in found if name in self._program.inputs]
        return list(dict.fromkeys(computed or given or found))

    def outputs(self, module: str) -> list[str]:
        """Return the values that `module` makes and others read, or the caller of the model."""
        inside = {step.name for step in self.steps(module)}
        made = {name for step in self.steps(module) for name in step.outputs}
        read = {
            name
            for step in self._program.steps
            if step.name not in inside
            for name in step.inputs.values()
        }
        ends = read.union(self._program.outputs)
        return [
            name
            for step in self.steps(module)
            for name in step.outputs
            if name in made & ends and name not in self._constants
        ]

    def reads(self, value: str, module: str) -> list[Read]:
        """Return the steps of `module` that read `value`; those whose layout is fixed left out."""
        known: dict[str, DimMap | None] = {value: None}
        found = []
        for step in self.steps(module):
            for port, name in enumerate(step.inputs.values()):
                if name not in known:
                    continue
                if step.outputs[0] in self._views:
                    view, before = self._views[step.outputs[0]][1], known[name]
                    known[step.outputs[0]] = view.after(before) if before else view
                elif not self._constants.issuperset(step.outputs):
                    found.append(Read(step=step, port=port, view=known[name]))
        return found

    def base(self, value: str) -> tuple[str, DimMap | None]:
        """Return the value that `value` is a view of, and its dims in it; or itself."""
        view: DimMap | None = None
        while value in self._views and value not in self._constants:
            source, own = self._views[value]
            view = view.after(own) if view else own
            value = source
        return value, view

    def is_constant(self, value: str) -> bool:
        """Return whether `value` depends on no parameter."""
        return value in self._constants

    def steps(self, module: str) -> Iterator[Step]:
        """Yield the steps that `module` or a module inside it runs."""
        prefix = f"{module}." if module else ""
        for step in self._program.steps:
            if not module or step.module == module or step.module.startswith(prefix):
                yield step
