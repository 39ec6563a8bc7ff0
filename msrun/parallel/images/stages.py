"""Parts of images in a pipeline.

A model sees the shapes of whole images, so a recording of its forward is that of whole images, and
its steps compute on parts by the same rules as the model's own code.  What the recording does not
tell is which tensors between chunks are parts, and of what: for that each rank runs the recorded
chunks once more, on parts without values.  So ranks agree without a message, and parts alone
travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.images.division import KEY, Images
from msrun.parallel.images.image_tensor import ImageTensor, Places, gathered, part
from msrun.parallel.losses.batch import map_leaves
from msrun.parallel.pipeline.record.follower import Follower, Run, Values

# Where each tensor that each chunk but the last sends is divided; None of one that is no image.
_Notes = list[list[Places | None]]


class StageImages(Images, Follower):
    """The parts of images in a stage of a pipeline; see `Images`."""

    # A function that exchanges rows in its backward pass would exchange them twice.
    can_wait = False

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `forward` of the whole model, or of one chunk."""
        if "pipeline_chunk" in kwargs:
            return forward(*args, **kwargs)
        return super().run(forward, args, kwargs)

    def end_recording(self, values: Values, run: Run) -> tuple[_Notes, Values]:
        """Return where the tensors that chunks send are divided, and the parts of this rank."""
        notes: _Notes = []
        parts: list[Sequence[Any]] = []
        received: Sequence[Any] = ()
        with warnings.catch_warnings():  # stages warn of what they compute whole
            warnings.simplefilter("ignore")
            for chunk in range(len(values)):
                received = run(chunk, received)
                notes.append(list(map(_places, received)))
                parts.append(list(map(part, received)))
        return notes, parts

    def receive(self, notes: _Notes, chunk: int, values: Sequence[Any]) -> Sequence[Any]:
        """Return images of the parts that `chunk` received."""
        places = notes[chunk - 1] if chunk else [None] * len(values)
        pairs = zip(values, places, strict=True)
        return [x if one is None else ImageTensor(x, self.axes, one) for x, one in pairs]

    def send(self, notes: _Notes, chunk: int, values: Any) -> Any:
        """Return the parts that `chunk` sends; of the model's output the whole, but in a step."""
        if chunk == len(notes):
            return values if self.is_step else map_leaves(gathered, values)
        for value, places in zip(values, notes[chunk], strict=True):
            if _places(value) != places:
                raise ModelError(
                    f"{KEY}: a stage sends a tensor of shape {tuple(value.shape)}, how it is "
                    "divided depends on values, and the next stage expects another part",
                    hint=f"cut the model elsewhere with {ROOT}.pipeline.stages",
                )
        return list(map(part, values))


def _places(x: Tensor) -> Places | None:
    return x.places if isinstance(x, ImageTensor) else None
