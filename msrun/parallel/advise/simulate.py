"""The memory of one forward and backward pass, found without memory.

The model runs on tensors that have shapes and no values (`torch_compat.fake_tensors`), with the
kernels of a host, so that all which torch allocates is seen: activations, what operators need in
between, gradients.  Each storage counts from the operator that makes it until nothing refers to it.
Parameters, buffers and the batch are there from the beginning and are not counted.

A `Division` has the model compute on the shards of one rank, with the runtime's own modules among
ranks that are not there (`torch_compat.fake_ranks`).  Collectives then make tensors as on a rank,
and their bytes are counted by the formulas.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.advise.host_memory import OnHost
from msrun.parallel.auto.tracing.structure import leaf_tensors, mapped
from msrun.parallel.experts.dispatch import PIECES_FROM
from msrun.parallel.layers import recompute
from msrun.parallel.local import local_part
from msrun.parallel.search.modules.seconds import RoutedCall
from msrun.parallel.sharded_model import Context
from msrun.parallel.torch_compat import dispatching, fake_mode, fake_tensors, without_functions

_GROUPED, _MATRIX = "aten::_grouped_mm", 2
NOTHING = OnHost()
_PLAIN = ("Tensor", "Parameter", "Buffer", "FakeTensor")


class Peaks(NamedTuple):
    """The most bytes that live at once, beside parameters, buffers and the batch.

    Args:
        total: With the gradients of parameters.
        activations: Without those whose computation has finished.
        normed: Bytes that batch norms read; the runtime's own, over all ranks, save them again.
        sent: Bytes that a rank sends in the collectives of one pass.
        parts: Parameter -> the share of it that a rank has, where that is not all.
        calls: Of experts.
        moved: Bytes that travel to the host and back.
    """

    total: int
    activations: int
    normed: int = 0
    sent: float = 0.0
    parts: Mapping[str, float] = {}
    calls: tuple[RoutedCall, ...] = ()
    moved: int = 0

    @property
    def routed(self) -> int:
        """Bytes of the tokens that go to experts, each as often as it has experts."""
        return int(sum(call.nbytes for call in self.calls))


class Division(Protocol):
    """What divides a model over ranks, for one pass."""

    def apply(self, net: nn.Module) -> tuple[Context, Context]:
        """Have `net` compute as on one rank, in place.

        Returns:
            The context of a pass, and that of a recomputation in it.
        """

    def part(self, net: nn.Module, inputs: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return what a rank calls `net` with."""

    @property
    def ranks(self) -> int:
        """Ranks over which it divides."""

    @property
    def divides_tokens(self) -> bool:
        """Whether a rank has a part of the tokens."""


class LiveBytes:
    """Counts the bytes of tensors that operators make, while they live.

    Args:
        ranks: That take part in each collective.

    Attributes:
        now: Bytes.
        peak: The most at any time.
        gradients: Of these, bytes of finished gradients.
        peak_without: The most of `now` without `gradients`.
        sent: Bytes that a rank sends in collectives.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.now = self.peak = self.gradients = self.peak_without = 0
        self.sent = 0.0
        self._ranks = ranks
        self._live: dict[int, int] = {}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, count what operators make."""
        with dispatching(self._handle):
            yield

    def know(self, tensors: Sequence[Tensor]) -> None:
        """Leave out `tensors`, which are there before."""
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            self._live[id(storage)] = 0
            weakref.finalize(storage, self._gone, id(storage))

    def watch(self, net: nn.Module, inputs: Sequence[Tensor]) -> None:
        """Leave out what `net` and a batch have, and know the gradients of parameters."""
        self.know([*net.parameters(), *net.buffers(), *inputs])
        for param in net.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda p: self.finished(p.grad))

    def finished(self, gradient: Tensor | None) -> None:
        """Count a tensor as the gradient of a parameter from now on."""
        if gradient is not None:
            self.gradients += self._live.get(id(local_part(gradient).untyped_storage()), 0)

    def _handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not is_plain(types):
            return NotImplemented
        output = _grouped(*args) if func.name() == _GROUPED else func(*args, **kwargs)
        if self._ranks > 1 and getattr(func, "namespace", "") == "_c10d_functional":
            self.sent += _sent(func.__name__, args[0], self._ranks)
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


def _grouped(one: Tensor, other: Tensor, *others: Any) -> Tensor:
    """Return the shape of a grouped matrix product, which torch gives for bfloat16 alone."""
    offsets = next(x for x in others if isinstance(x, Tensor))
    rows, columns = one.shape[-2], other.shape[-1]
    is_by_groups = one.dim() == other.dim() == _MATRIX
    return one.new_empty((len(offsets), rows, columns) if is_by_groups else (rows, columns))


def is_plain(types: Sequence[type]) -> bool:
    """Return whether operators of tensors of these types are what torch computes.

    Those of other types, such as DTensor, become operators of these, which come back to the mode.
    """
    return all(kind.__name__ in _PLAIN for kind in types)


def _sent(name: str, given: Any, ranks: int) -> float:
    """Return the bytes that a rank sends in a collective of `given`; see `techniques.traffic`."""
    nbytes = sum(tensor.nbytes for tensor in leaf_tensors([given]))
    times = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather_into_tensor": ranks - 1,
        "reduce_scatter_tensor": (ranks - 1) / ranks,
        "all_to_all_single": (ranks - 1) / ranks,
    }
    return times.get(name.partition(".")[0], 0) * nbytes


class Undivided:
    """Divides nothing; a `Division`."""

    ranks = 1
    divides_tokens = False

    def apply(self, net: nn.Module) -> tuple[Context, Context]:
        """Leave `net` as it is."""
        del net
        return contextlib.nullcontext, contextlib.nullcontext

    def part(self, net: nn.Module, inputs: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return all of the inputs."""
        del net
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return (), inputs[0]
        return inputs, {}


def simulate(
    model: nn.Module,
    sample: Sequence[Any],
    recomputed: Sequence[str] = (),
    division: Division | None = None,
    *,
    routed: Sequence[str] = (),
    on_host: OnHost = NOTHING,
    slices: int = 1,
) -> Peaks:
    """Return the memory of one forward and backward pass of `model`.

    Args:
        model: On the device `meta`; it stays as it is.
        sample: Inputs by position, on the device `meta`; or one mapping of inputs by name.
        recomputed: Modules that recompute.
        division: Divides it over ranks.
        routed: Names of modules of experts.
        on_host: What is in the memory of the host.
        slices: Forwards of such inputs that have one backward pass together.

    Raises:
        ModelError: The forward needs values, or the division refuses the model.
    """
    net = copy.deepcopy(model).train()
    division = division or Undivided()
    live = LiveBytes(division.ranks)
    normed: list[int] = []
    for part in batch_norms(net):
        part.register_forward_pre_hook(lambda _, given: normed.append(given[0].nbytes))
    tokens = _counted_tokens(net, routed)
    try:
        with fake_tensors(fake_mode()):
            _give_shapes(net)
            inputs = mapped(list(sample), _on_host)
            sizes = {name: param.numel() for name, param in net.named_parameters()}
            computing, again = division.apply(net)
            traffic = on_host.apply(net)
            if recomputed:
                recompute.apply(net, recomputed, [], again, {})
            live.watch(net, leaf_tensors(inputs))
            with live.counted(), computing():
                args, named = division.part(net, inputs)
                is_part = division.divides_tokens
                losses = [loss_of(net(*args, **named), is_part=is_part) for _ in range(slices)]
                (torch.stack(losses).sum() if slices > 1 else losses[0]).backward()
    except ModelError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"advise: {type(model).__name__} cannot run without values: {reason}",
            hint="its forward and the sample must fit each other, and no step may depend on "
            "values of tensors",
        ) from error
    parts = {name: _share(param, sizes.get(name, 0)) for name, param in net.named_parameters()}
    parts = {name: share for name, share in parts.items() if share < 1}
    found = Peaks(live.peak, live.peak_without, sum(normed), live.sent, parts)
    return found._replace(calls=tuple(tokens), moved=traffic.nbytes)


def _counted_tokens(net: nn.Module, routed: Sequence[str]) -> list[RoutedCall]:
    """Return a list that gets each call of experts."""
    tokens: list[RoutedCall] = []
    for name in routed:
        experts = net.get_submodule(name)
        is_list = isinstance(experts, nn.ModuleList | nn.ModuleDict)
        count = _rows if is_list else _routed
        for part in experts.children() if is_list else [experts]:
            part.register_forward_pre_hook(
                lambda part, args, kwargs, count=count: tokens.append(
                    count(part, *args, *kwargs.values())
                ),
                with_kwargs=True,
            )
    return tokens


def _rows(_: nn.Module, /, *given: Any) -> RoutedCall:
    """Return the call of one expert of a list."""
    return RoutedCall(sum(x.nbytes for x in given if isinstance(x, Tensor)))


def _routed(experts: nn.Module, /, *given: Any) -> RoutedCall:
    """Return the call of experts with (tokens, width), and (tokens, experts of each)."""
    tensors = [x for x in given if isinstance(x, Tensor) and x.dim() > 1]
    choices = [x.shape[-1] for x in tensors if not x.is_floating_point()]
    if not tensors or not choices:
        return RoutedCall(0)
    # A weight of an expert meets each of its tokens once, in a product and a sum.
    of_token = 2 * sum(math.prod(param.shape[1:]) for param in experts.parameters())
    nbytes = tensors[0].nbytes * choices[0]
    return RoutedCall(
        nbytes,
        len(tensors[0]) * choices[0] * of_token,
        is_in_pieces=nbytes >= PIECES_FROM,
    )


def _give_shapes(net: nn.Module) -> None:
    """Have the tensors of `net` be of a host; modules that share one go on to share it."""
    made: dict[int, Tensor] = {}

    def on_host(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
        return made[id(tensor)]

    for module in net.modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            setattr(module, name, on_host(tensor))


def _share(param: Tensor, size: int) -> float:
    return local_part(param).numel() / size if size else 1.0


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms of a model."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [part for part in model.modules() if isinstance(part, kinds)]


def loss_of(output: Any, *, is_part: bool = False) -> Tensor:
    """Return the loss in an output: its attribute `loss`, or a scalar; else squares of all.

    Args:
        output: Of the model.
        is_part: Whether it is of a part of the tokens, over which the model takes no mean.
    """
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
    with without_functions() if is_part else contextlib.nullcontext():
        return torch.stack([x.float().pow(2).mean() for x in tensors]).sum()


def _on_host(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="cpu") if isinstance(leaf, Tensor) else leaf
