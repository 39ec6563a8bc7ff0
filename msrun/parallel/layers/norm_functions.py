"""The functions of torch that normalize over a batch, replaced while a sharded model runs.

The problem.  A data-parallel rank sees a part of the batch, and `functional.batch_norm` normalizes
by the statistics of that part.  The statistics must be those of the global batch, wherever a model
calls the function: in torch's batch norms, in subclasses with a forward of their own, and in the
model's own code.

The idea.  Replace the functions, not the modules.  `NormFunctions.active` makes a rank's thread
compute `batch_norm` over all ranks, and leaves everything around the call to the model: its
activation, its momentum, a flag that freezes it.  The attributes of `torch` and
`torch.nn.functional` are replaced while some thread is inside `active`, and torch's own are there
again afterwards.  Other threads get torch's own results meanwhile.

A `TorchFunctionMode` would need no replacement, and would slow down every function of the model by
a microsecond, for models without any batch norm too.

Instance norms normalize each sample, so only their running statistics need all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.collectives import all_reduce
from msrun.parallel.local import full_tensor, has_parts, is_sharded, on_parts
from msrun.parallel.norms.normalize import normalized

ANY_REGION = object()


class NormFunctions:
    """Batch norms and instance norms by the statistics of all samples of a group.

    A copy of a model shares this object.  A pickled one has no group, and computes as torch does.

    Args:
        group: Ranks that share the batch; None for one rank.
        refusal: Why nothing may normalize over a batch here, such as micro-batches; None allows it.
        samples: Ranks of the group that have other samples; several of it may share an image.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        refusal: str | None,
        samples: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._samples = samples
        self._refusal = refusal
        self._has_warned = False

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_group": None, "_samples": None}

    def active(
        self, name: str, region: object = ANY_REGION
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that replaces the functions for code that this thread runs inside.

        Args:
            name: Module that runs, for messages.
            region: Region of `torch.utils.checkpoint` that the code runs in, None outside of one.
                A region that begins inside would run again in backward without this context, so
                functions in it are refused.  `ANY_REGION` says that none begins inside.
        """
        return _Active(_Scope(self, name, region))

    def recomputed(self) -> contextlib.AbstractContextManager[None]:
        """Return `active` for a recomputation by the configuration, which enters it each time."""
        return self.active("a recomputed module", torch_compat.checkpointed())

    def check(self, scope: _Scope) -> None:
        """Refuse statistics of a batch that cannot be those of the global batch.

        Raises:
            ModelError: See `refusal`; or a recomputation would run the function unreplaced.
        """
        if self._refusal:
            raise ModelError(
                f"{self._refusal} {scope.name} sees one of them at a time",
                hint="say `batch_norm: local` if that is meant",
            )
        # A compiled recomputation runs what was traced, with its collectives.
        if scope.region is ANY_REGION or torch.compiler.is_compiling():
            return
        if torch_compat.checkpointed() is not scope.region:
            raise ModelError(
                f"{scope.name} calls functional.batch_norm inside torch.utils.checkpoint, which "
                "would run it again with the statistics of one rank",
                hint="use nn.BatchNorm, or `recompute` of the configuration",
            )

    def batch_norm(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        affine: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Normalize `x`, (batch, channels, ...), as `functional.batch_norm` does in training.

        Two all-reduces over the group: sums of values and counts, then of squared distances from
        the mean.  One all-reduce with sums of squares would lose precision where the mean is large.
        Channels that a plan sharded are gathered, with a warning for the first.
        """
        if has_parts(x):  # of images, over all ranks
            from msrun.parallel.images.rules_norms import batch_standardized

            compute = partial(
                batch_standardized,
                running=running,
                affine=affine,
                momentum=momentum,
                eps=eps,
                total=self._sum_of_parts,
            )
            return on_parts(x, lambda part: compute(full_tensor(part)))
        if is_sharded(x) and any(p.is_shard() for p in x.placements) and not self._has_warned:
            self._has_warned = True
            warnings.warn("msrun: batch_norm is computed whole on every rank", stacklevel=2)
        return normalized(
            full_tensor(x), running, affine, momentum=momentum, eps=eps, total=self._sum
        )

    @torch.no_grad()
    def share_running(self, samples: int, running: tuple[Tensor | None, Tensor | None]) -> None:
        """Make running statistics of instance norms the mean over the samples of all ranks.

        Each is linear in the samples, so the mean over ranks by samples is that of one process.
        """
        tensors = [tensor for tensor in running if tensor is not None]
        if self._samples is None or not tensors:
            return
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        count = tensors[0].new_ones(1, dtype=dtype)
        flat = torch.cat([*(tensor.to(dtype) for tensor in tensors), count]) * samples
        *means, total = self._sum(flat).split([*(tensor.numel() for tensor in tensors), 1])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean / total)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self._samples is None else all_reduce(x, self._samples)

    def _sum_of_parts(self, x: Tensor) -> Tensor:
        return x if self._group is None else all_reduce(x, self._group)

    @property
    def is_plain(self) -> bool:
        """Whether torch's own functions give the result, as on one rank."""
        return self._group is None and self._refusal is None


class _Scope:
    """The innermost `active` of a thread; see there."""

    __slots__ = ("functions", "name", "region")

    def __init__(self, functions: NormFunctions, name: str, region: object) -> None:
        self.functions = functions
        self.name = name
        self.region = region


class _Active(contextlib.AbstractContextManager[None]):
    """See `NormFunctions.active`; each forward of a model and each norm enters one."""

    __slots__ = ("_outer", "scope")

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope
        self._outer: _Active | None = None

    def __enter__(self) -> None:
        self._outer = _innermost()
        _THREAD.active = self
        _REPLACED.enter()

    def __exit__(self, *_: object) -> None:
        _REPLACED.leave()
        _THREAD.active = self._outer


def _innermost() -> _Active | None:
    return getattr(_THREAD, "active", None)


@contextlib.contextmanager
def all_left() -> Iterator[None]:
    """Leave at the end what forwards inside have entered and not left.

    Hooks of a module do not run behind its forward if an interrupt, or the end of another copy, has
    cut it short.
    """
    before = _innermost()
    try:
        yield
    finally:
        while (active := _innermost()) is not None and active is not before:
            active.__exit__()


def _scope() -> _Scope | None:
    """Return what replaces the functions for this thread now; None for torch's own."""
    active = _innermost()
    return None if active is None or active.scope.functions.is_plain else active.scope


# Parameters in their order: all may be passed by position or by name.
_RUNNING, _AFFINE = ("running_mean", "running_var"), ("weight", "bias")
_OPTIONS = ("training", "momentum", "eps")
_FUNCTIONAL = ("input", *_RUNNING, *_AFFINE, *_OPTIONS)
_TORCH = ("input", *_AFFINE, *_RUNNING, *_OPTIONS)
_INSTANCES = ("input", *_AFFINE, *_RUNNING, "use_input_stats")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def _batch_norm(
    names: Sequence[str], original: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    scope = _scope()
    if scope is None:
        return original(*args, **kwargs)
    given = _DEFAULTS | dict(zip(names, args, strict=False)) | kwargs
    if not given["training"] or given["eps"] <= 0:
        return original(*args, **kwargs)
    scope.functions.check(scope)
    running = given["running_mean"], given["running_var"]
    affine = given["weight"], given["bias"]
    return scope.functions.batch_norm(
        given["input"], running, affine, given["momentum"], given["eps"]
    )


def _instance_norm(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    scope = _scope()
    if scope is None:
        return original(*args, **kwargs)
    given = dict(zip(_INSTANCES, args, strict=False)) | kwargs
    running = given["running_mean"], given["running_var"]
    if not given["use_input_stats"] or all(old is None for old in running):
        return original(*args, **kwargs)
    scope.functions.check(scope)
    result = original(*args, **kwargs)
    scope.functions.share_running(len(given["input"]), running)
    return result


def _sync_batch_norm_forward(
    original: Callable[..., Tensor], module: nn.SyncBatchNorm, *args: Any, **kwargs: Any
) -> Tensor:
    """Run torch's SyncBatchNorm as a plain batch norm, whose function is replaced.

    torch's own runs on accelerators only, and over all ranks of the job: over `tp` each sample
    would count several times.
    """
    if _scope() is None:
        return original(module, *args, **kwargs)
    return nn.BatchNorm2d.forward(module, *args, **kwargs)


class _NormTarget:
    """A function of torch that is replaced: the one it was at the last look, and what replaced it.

    Each forward replaces the same few, so what replaces them is made once.
    """

    __slots__ = ("function", "name", "original", "owner", "replacement")

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Tensor]) -> None:
        self.owner = owner
        self.name = name
        self.replacement = replacement
        self.original: Any = None
        self.function: Any = None

    def replace(self) -> None:
        original = getattr(self.owner, self.name)
        if original is not self.original:
            self.original, self.function = original, _replaced(original, self.replacement)
        setattr(self.owner, self.name, self.function)


class _Replacement:
    """Replaces the functions while any thread is inside of `enter` and `leave`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._targets = (
            _NormTarget(functional, "batch_norm", partial(_batch_norm, _FUNCTIONAL)),
            _NormTarget(torch, "batch_norm", partial(_batch_norm, _TORCH)),
            _NormTarget(torch, "instance_norm", _instance_norm),
            _NormTarget(nn.SyncBatchNorm, "forward", _sync_batch_norm_forward),
        )

    def enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            for target in self._targets:
                target.replace()

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            for target in self._targets:
                setattr(target.owner, target.name, target.original)


def _replaced(original: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> Any:
    # Modes of torch functions and tracers tell functions by their names.
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Tensor:
        return replacement(original, *args, **kwargs)

    return function


# The functions of torch exist once in a process, so what replaces them does too.
_THREAD = threading.local()
_REPLACED = _Replacement()
