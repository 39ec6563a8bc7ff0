"""Modules of a model on parts of sequences that run apart: compiled, without following functions.

Attention and positions are those of all ranks while `Sequences` sees each function of the model.
The compiler does not follow it, so a compiled module may have neither.  It runs uncompiled in a
first step, where a function that `Sequences` would replace is refused with the name of the module.
Later on it runs outside of `Sequences`, as one graph: what the compiler would leave to Python would
be no function of all ranks.  Each new graph, such as for another way through the code, is searched
for the same functions.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT
from msrun.parallel.context.sequences import Sequences
from msrun.parallel.context.sites import apart_refusal


class ModuleApart:
    """A module that runs apart from `Sequences` once it is compiled.

    Args:
        sequences: Of its model.
        name: Of the module.
        module: The module, whose forward and those inside become what they were.
    """

    def __init__(self, sequences: Sequences, name: str, module: nn.Module) -> None:
        self._sequences, self._name = sequences, name
        self._problem = ""
        sequences.leave_out(module, is_compiled=True)

    def compiled(self, forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
        """Return `forward`, which is compiled to graphs that are searched."""
        return torch_compat.compiled_whole(forward, mode, self._search)

    def is_followed(self) -> bool:
        """Return whether functions are looked at now, so that none may be compiled."""
        return self._sequences.watch_now() is not None

    def refusing(self) -> AbstractContextManager[None]:
        """Return a context in which what `Sequences` replaces is refused."""
        return self._sequences.apart(self._name)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run compiled inside."""
        try:
            with torch_compat.without_mode(self._sequences):
                yield
        except Exception as error:
            if not torch_compat.breaks_graph(error):
                raise
            raise ModelError(
                f"{ROOT}.compile.modules: the compiler makes no single graph of {self._name}, "
                "which has parts of sequences: " + str(error).strip().partition("\n")[0],
                hint="name modules that it follows as a whole, such as parts of this one",
            ) from error
        if self._problem:
            raise apart_refusal(self._name, self._problem)

    def _search(self, graph: fx.GraphModule) -> None:
        """Note what in a graph `Sequences` would have replaced."""
        for part in graph.modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.nodes:
                    self._problem = self._problem or self._found(node)

    def _found(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return ""
        if node.target is functional.scaled_dot_product_attention:
            return "attention"
        if node.target is torch.arange:
            return "torch.arange"
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            value = node.args[0].meta.get("example_value")
            items = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            if isinstance(value, torch.Tensor) and self._sequences.takes_first_rows(value, items):
                return "a slice of a table"
        return ""
