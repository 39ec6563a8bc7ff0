"""What chunks send each other, for each shape of micro-batches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from msrun.errors import ModelError
from msrun.parallel.losses.batch import map_leaves
from msrun.parallel.pipeline.border import Border, Borders
from msrun.parallel.pipeline.chunks import STAGES
from msrun.parallel.pipeline.plan import SplitPlan
from msrun.parallel.pipeline.skeleton import META, Skeleton
from msrun.parallel.pipeline.trace import shown


class NeedsValues(Exception):  # noqa: N818 - no failure: they are measured then
    """The model does not run without values; the text says why."""


class Shapes:
    """Finds what chunks send, once for each shape of micro-batches.

    Args:
        plan: Of the whole model.
        model: Nothing was done to it yet.
    """

    def __init__(self, plan: SplitPlan, model: nn.Module) -> None:
        self._plan = plan
        self._known: dict[Hashable, Borders] = {}
        self._skeleton: Skeleton | None = None
        self._reason = ""
        try:
            self._skeleton = Skeleton(model, plan.traced)
        except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
            self._reason = _first_line(error)

    def find(self, inputs: Sequence[Any], *, training: bool) -> Borders:
        """Return what chunks send for one micro-batch of `inputs`.

        Raises:
            ModelError: They would send something else than tensors.
            NeedsValues: It cannot be known; the text says why.
        """
        key = (training, kinds(inputs))
        if key not in self._known:
            self._known[key] = self._borders(inputs, training=training)
        return self._known[key]

    def saved_bytes(
        self, inputs: Sequence[Any], borders: Borders, *, training: bool
    ) -> list[int] | None:
        """Return the bytes that each chunk saves of one micro-batch for its backward.

        Without recomputation and sharding inside a stage.  None where the model needs values.

        Args:
            inputs: Of the micro-batch.
            borders: What chunks send for it.
            training: Mode of the modules.
        """
        if self._skeleton is None:
            return None
        saved = []
        try:
            for program, received in zip(self._plan.programs, [(), *borders], strict=True):
                values = [*inputs, *(border.empty(META) for border in received)]
                saved.append(self._skeleton.saved_bytes(program.graph, values, training=training))
        except Exception:  # noqa: BLE001 - the model's own code may raise anything
            return None
        return saved

    def _borders(self, inputs: Sequence[Any], *, training: bool) -> Borders:
        if self._skeleton is None:
            raise NeedsValues(self._reason)
        senders = self._plan.programs[:-1]
        wanted = {node for program in senders for node in program.sent}
        try:
            values = self._skeleton.values(inputs, wanted, training=training)
        except Exception as error:  # noqa: BLE001 - as above
            raise NeedsValues(_first_line(error)) from None
        return tuple(
            tuple(make_border(node, values[node]) for node in program.sent) for program in senders
        )


def kinds(inputs: Sequence[Any]) -> Hashable:
    """Return what of `inputs` decides about shapes."""
    return repr(map_leaves(lambda tensor: (tensor.shape, tensor.dtype), list(inputs)))


def make_border(node: fx.Node, value: Any) -> Border:
    """Return what a chunk sends as the value of `node`.

    Raises:
        ModelError: It is no tensor.
    """
    if not isinstance(value, Tensor):
        raise ModelError(
            f"{STAGES}: {shown(node)} yields {type(value).__name__}, which another stage uses",
            hint="only tensors go from stage to stage: cut where the model hands on a tensor",
        )
    return Border(
        name=shown(node),
        shape=tuple(value.shape),
        dtype=value.dtype,
        requires_grad=value.requires_grad,
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
