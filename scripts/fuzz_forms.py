"""The model of a drawn case, and the forms of its batch and its output."""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import fuzz_blocks
import fuzz_habits
import fuzz_layers
import fuzz_quirks
import torch
from torch import Tensor, nn

BLOCKS: dict[str, type[nn.Module]] = {
    **fuzz_quirks.BLOCKS,
    **fuzz_blocks.BLOCKS,
    **fuzz_layers.BLOCKS,
    **fuzz_habits.BLOCKS,
}


class Fuzzed(nn.Module):
    """The model of a case.

    Args:
        blocks: Names of its blocks.
    """

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BLOCKS[name]() for name in blocks])
        self.head = nn.Linear(fuzz_quirks.WIDTH, fuzz_quirks.CLASSES)

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FuzzedWithLoss(Fuzzed):
    """The same, with its loss.

    Args:
        blocks: As of `Fuzzed`.
        loss: Of logits and labels.
    """

    def __init__(self, blocks: Sequence[str], loss: Callable[[Any, Any], Any]) -> None:
        super().__init__(blocks)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        """Return loss and logits."""
        output = super().forward(x)
        loss = self.loss(output, labels)
        for block in self.blocks:
            auxiliary: Any = getattr(block, "auxiliary", None)
            if auxiliary is not None:
                loss = loss + 0.1 * auxiliary
        return {"loss": loss, "logits": output}


class _FuzzedWithTuple(FuzzedWithLoss):
    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        """Return a tuple of loss and logits."""
        found = super().forward(x, labels)
        return found["loss"], found["logits"]


class _FuzzedPenalized(FuzzedWithLoss):
    total = staticmethod(lambda found: found["logits"].square().sum())

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        """Return a loss with a penalty on the gradient of each sample by its inputs."""
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            found = super().forward(x, labels)
            by = self.differentiated(x)
            (slopes,) = torch.autograd.grad(self.total(found), by, create_graph=self.training)
        return {**found, "loss": found["loss"] + 0.1 * slopes.square().mean()}

    def differentiated(self, x: Tensor) -> Tensor:
        """Return by what the penalized gradient is taken."""
        return x


class _FuzzedPenalizedLogits(_FuzzedPenalized):
    total = staticmethod(lambda found: found["logits"].sum())


class _FuzzedPenalizedLoss(_FuzzedPenalized):
    total = staticmethod(lambda found: found["loss"])


class _FuzzedPenalizedWeight(_FuzzedPenalizedLoss):
    def differentiated(self, x: Tensor) -> Tensor:
        """Return a weight."""
        del x
        return self.head.weight


class _FuzzedNested(Fuzzed):
    def forward(self, batch: dict[str, Any]) -> Any:  # type: ignore[override]
        """Return logits."""
        return super().forward(batch["inputs"]["x"] * batch["scale"])


class Pair(NamedTuple):
    """Two inputs."""

    x: Tensor
    shift: Tensor


class _FuzzedPair(Fuzzed):
    def forward(self, pair: Pair) -> Any:  # type: ignore[override]
        """Return logits."""
        return super().forward(pair.x + 0.1 * pair.shift)


class _FuzzedList(Fuzzed):
    def forward(self, tensors: list[Tensor], other: Tensor | None = None) -> Any:  # type: ignore[override]
        """Return logits."""
        x = super().forward(tensors[0] + 0.1 * tensors[1])
        return x if other is None else x + other.mean(-1, keepdim=True)


class _FuzzedPlain(Fuzzed):
    def forward(
        self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, form: str = "none"
    ) -> Any:
        """Return logits."""
        x = x if mask is None else x * mask
        return super().forward(x * scale if form == "scaled" else x)


class _FuzzedTokens(Fuzzed):
    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__(blocks)
        self.table = nn.Embedding(4, fuzz_quirks.WIDTH)

    def forward(self, tokens: Tensor) -> Any:
        """Return logits of the mean of embeddings of whole numbers."""
        return super().forward(self.table(tokens).mean(1))


class _FuzzedBoolean(Fuzzed):
    def forward(self, x: Tensor, mask: Tensor, place: int, name: str | None = None) -> Any:  # type: ignore[override]
        """Return logits of what a mask leaves."""
        del name
        return super().forward(x.masked_fill(mask, 0.1 * place))


@dataclass
class Inputs:
    """Inputs in a data class."""

    x: Tensor
    scale: float = 0.5
    other: Tensor | None = None


class _FuzzedInputs(Fuzzed):
    def forward(self, batch: Inputs) -> Any:  # type: ignore[override]
        """Return logits."""
        return super().forward(batch.x * batch.scale)


class _FuzzedMapping(Fuzzed):
    def forward(self, x: Tensor) -> Any:
        """Return a mapping, with a value that is no tensor."""
        return {"hidden": x, "logits": super().forward(x), "kind": "logits", "none": None}


class _FuzzedTuple(Fuzzed):
    def forward(self, x: Tensor) -> Any:
        """Return a tuple with a nested one."""
        return (x, (super().forward(x), None))


class Logits(NamedTuple):
    """What a model returns."""

    logits: Tensor
    hidden: Tensor | None = None


class _FuzzedNamed(Fuzzed):
    def forward(self, x: Tensor) -> Any:
        """Return a named tuple."""
        return Logits(super().forward(x), x)


@dataclass
class Result:
    """What a model returns."""

    logits: Tensor
    scale: float = 1.0


class _FuzzedData(Fuzzed):
    def forward(self, x: Tensor) -> Any:
        """Return a data class."""
        return Result(super().forward(x))


@dataclass(frozen=True, slots=True)
class Form:
    """A form of batch and output.

    Args:
        kind: The model.
        inputs: Returns the arguments of `rt.step` between loss function and target.
        logits: Returns the logits in an output.
        loss: Returns the loss in an output of a model that returns it.
    """

    kind: type[Fuzzed] = Fuzzed
    inputs: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,)
    logits: Callable[[Any], Tensor] = lambda output: output
    loss: Callable[[Any], Any] = lambda output: output["loss"]

    @property
    def has_loss(self) -> bool:
        """Whether the model returns its loss."""
        return issubclass(self.kind, FuzzedWithLoss)

    def call(self, model: nn.Module, x: Tensor) -> Any:
        """Return the output of the model for inputs `x`."""
        inputs = self.inputs(x)
        if self.is_named:
            return model(**inputs[0])
        return model(*inputs)

    @property
    def is_named(self) -> bool:
        """Whether inputs have names."""
        return self.kind is _FuzzedPlain or self is FORMS["by name"]


FORMS: dict[str, Form] = {
    "by position": Form(),
    "by name": Form(inputs=lambda x: ({"x": x},)),
    "own loss": Form(FuzzedWithLoss, logits=lambda output: output["logits"]),
    "own loss in a tuple": Form(
        _FuzzedWithTuple, logits=lambda output: output[1], loss=lambda output: output[0]
    ),
    "gradient penalty": Form(_FuzzedPenalized, logits=lambda output: output["logits"]),
    "gradient penalty of logits": Form(
        _FuzzedPenalizedLogits, logits=lambda output: output["logits"]
    ),
    "gradient penalty of loss": Form(_FuzzedPenalizedLoss, logits=lambda output: output["logits"]),
    "gradient penalty by weights": Form(
        _FuzzedPenalizedWeight, logits=lambda output: output["logits"]
    ),
    "tokens": Form(_FuzzedTokens, lambda x: ((x > 0).long() + (x > 1).long(),)),
    "mask and numbers": Form(_FuzzedBoolean, lambda x: (x, x < -1, 2, "name")),
    "data class input": Form(_FuzzedInputs, lambda x: (Inputs(x),)),
    "nested": Form(_FuzzedNested, lambda x: ({"inputs": {"x": x}, "scale": 0.5},)),
    "named tuple": Form(_FuzzedPair, lambda x: (Pair(x, x.flip(1)),)),
    "list": Form(_FuzzedList, lambda x: ([x, x.flip(1)], x)),
    "plain values": Form(
        _FuzzedPlain,
        lambda x: ({"x": x, "scale": 0.5, "mask": (x > -1).to(x.dtype), "form": "scaled"},),
    ),
    "mapping output": Form(_FuzzedMapping, logits=lambda output: output["logits"]),
    "tuple output": Form(_FuzzedTuple, logits=lambda output: output[1][0]),
    "named output": Form(_FuzzedNamed, logits=lambda output: output.logits),
    "data class output": Form(_FuzzedData, logits=lambda output: output.logits * output.scale),
}
