"""The memory of one forward and backward pass, found without memory.

The model runs on tensors that have shapes and no values (`torch_compat.fake_tensors`), with the
kernels of a host, so that all which torch allocates is seen: activations, what operators need in
between, gradients.  Each storage counts from the operator that makes it until nothing refers to it.
Parameters, buffers and the batch are there from the beginning and are not counted.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.structure import leaf_tensors, mapped
from msrun.parallel.layers import recompute
from msrun.parallel.torch_compat import dispatching, fake_mode, fake_tensors


class Peaks(NamedTuple):
    """The most bytes that live at once, beside parameters, buffers and the batch.

    Args:
        total: With the gradients of parameters.
        activations: Without those whose computation has finished.
        normed: Bytes that batch norms read; the runtime's own, over all ranks, save them again.
    """

    total: int
    activations: int
    normed: int = 0


class LiveBytes:
    """Counts the bytes of tensors that operators make, while they live.

    Attributes:
        now: Bytes.
        peak: The most at any time.
        gradients: Of these, bytes of finished gradients.
        peak_without: The most of `now` without `gradients`.
    """

    def __init__(self) -> None:
        self.now = self.peak = self.gradients = self.peak_without = 0
        self._live: dict[int, int] = {}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, count what operators make."""
        with dispatching(self._handle):
            yield

    def know(self, tensors: Sequence[Tensor]) -> None:
        """Leave out `tensors`, which are there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[id(storage)] = 0
            weakref.finalize(storage, self._gone, id(storage))

    def finished(self, gradient: Tensor | None) -> None:
        """Count a tensor as the gradient of a parameter from now on."""
        if gradient is not None:
            self.gradients += self._live.get(id(gradient.untyped_storage()), 0)

    def _handle(self, func: Any, _: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        for tensor in leaf_tensors([output]):
            self._add(tensor)
        return output

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._live:
            return
        nbytes = storage.nbytes()
        self._live[id(storage)] = nbytes
        weakref.finalize(storage, self._gone, id(storage))
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        self.peak_without = max(self.peak_without, self.now - self.gradients)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)


def simulate(model: nn.Module, sample: Sequence[Any], recomputed: Sequence[str] = ()) -> Peaks:
    """Return the memory of one forward and backward pass of `model`.

    Args:
        model: On the device `meta`; it stays as it is.
        sample: Inputs by position, on the device `meta`; or one mapping of inputs by name.
        recomputed: Modules that recompute.

    Raises:
        ModelError: The forward needs values.
    """
    net = copy.deepcopy(model).train()
    live = LiveBytes()
    normed: list[int] = []
    for part in batch_norms(net):
        part.register_forward_pre_hook(lambda _, given: normed.append(given[0].nbytes))
    try:
        with fake_tensors(fake_mode()):
            net.to_empty(device="cpu")
            inputs = mapped(list(sample), _on_host)
            if recomputed:
                recompute.apply(net, recomputed, [], contextlib.nullcontext)
            live.know([*net.parameters(), *net.buffers(), *leaf_tensors(inputs)])
            for param in net.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(lambda p: live.finished(p.grad))
            with live.counted():
                loss_of(called(net, inputs)).backward()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"advise: {type(model).__name__} cannot run without values: {reason}",
            hint="its forward and the sample must fit each other, and no step may depend on "
            "values of tensors",
        ) from error
    return Peaks(live.peak, live.peak_without, sum(normed))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms of a model."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [part for part in model.modules() if isinstance(part, kinds)]


def called(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """Return the output of `model`, whose inputs may be one mapping by name."""
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return model(**inputs[0])
    return model(*inputs)


def loss_of(output: Any) -> Tensor:
    """Return the loss in an output: its attribute `loss`, or a scalar; else squares of all."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [x for x in leaf_tensors([output]) if x.is_floating_point() and x.requires_grad]
    scalars = [x for x in tensors if not x.dim()]
    if scalars:
        return scalars[0]
    if not tensors:
        raise ModelError("its output has no tensor with a gradient")
    # A loss function that is called outside takes about as much.
    return torch.stack([x.float().pow(2).mean() for x in tensors]).sum()


def _on_host(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="cpu") if isinstance(leaf, Tensor) else leaf
