"""Checks now and then that replicated parameters and buffers are equal on all ranks.

The problem.  Replicas begin equal, and equal gradients keep them equal, so nothing compares them
later.  A script can part them: noise that each rank draws for its weights, `reset_parameters` or
`load_state_dict` after `rt.shard`, a buffer that forward computes from this rank's samples.
Nothing fails then.  Each rank trains another model, with gradients of all of them.

The idea.  At optimizer steps 1, 3, 10, 30, 100, 300 and every 1000, and before a checkpoint, each
rank computes a digest of the bits of every replicated tensor.  One all-reduce of four integers
along each mesh axis compares them: all are equal if their maximum is their minimum.  With several
axes one more tells all ranks.  Only if digests differ do ranks exchange them by name, and then the
tensors that differ.

When ranks compare: in `optimizer.step`, before it changes a weight.  A hook of the optimizer does,
so that plain loops compare as well.

Invariants:

- Along `dp` replicas are equal to the bit: they get the same sums from one all-reduce and run the
  same operations on them.  On unlike devices the operations may round otherwise, so a difference of
  some units in the last place is a warning.  Along other axes each rank computes the gradients of a
  replicated parameter for itself, with operators that may sum in any order on an accelerator, so
  there only a gross difference is refused.
- All ranks raise, or none: what they compare they have from collectives.
- A step that compares nothing costs one addition.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import ModelError, RanksDisagreeError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ParallelConfig
from msrun.parallel.exchange import messages
from msrun.parallel.foreach.plain_steps import OutsideParameters
from msrun.parallel.foreach.whole_values import take_given, take_numbers, take_written
from msrun.parallel.layout import EXPERT_COPIES
from msrun.parallel.local import is_sharded, local_part
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import unreduced_gradients
from msrun.parallel.uneven_rows.rows import rows_of

OptimizerRef = weakref.ref[torch.optim.Optimizer]

_GIVEN = "the state dict that load_state_dict was given"
_COMPUTED = "the plain tensors that the script computed with sharded parameters or gradients"
_OPTION = "the optimizer's "
_NUMBERS = "the numbers that the script multiplied or added to sharded parameters or gradients"
_WRITTEN = "what the forward wrote to its parameters"
_READ = "the batches of rt.loader"
_FIRST_STEPS = frozenset([1, 3, 10, 30, 100, 300])
_EVERY = 1000
_COLUMNS = 4096
_NAMES_SHOWN = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Differences that count as rounding, relative to the largest element: along `dp` in units of the
# type's precision, along other axes as they are.
_ROUNDING_UNITS = 4
_GROSS = 1e-2
_TO_THE_BIT = (DATA_AXIS, "dp_replicate", EXPERT_COPIES)
_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as int64


class ReplicaDigest:
    """Compares the replicated tensors of one model between ranks.

    Args:
        model: The model after `rt.shard`; only referred to weakly.
        config: The configuration.
        context: This rank.
        excluded: Names of parameters that each rank trains for itself.

    Attributes:
        outside: Parameters of the script that data-parallel ranks train, too.
        has_compared: Whether ranks have compared replicas.
        has_turns: Whether ranks wait for each other in each step.
    """

    has_compared = False

    def __init__(
        self,
        model: nn.Module,
        config: ParallelConfig,
        context: RankContext,
        excluded: Collection[str],
    ) -> None:
        self._model = weakref.ref(model)
        self._context = context
        self._excluded = excluded
        # With `batch_norm: local` each rank's buffers follow its own batch.
        self._has_buffers = config.batch_norm == "sync"
        names = [
            name
            for name in context.layout.axes
            if name == DATA_AXIS or (name != PIPELINE_AXIS and config.mode != "manual")
        ]
        self._axes = {name: name for name in names}
        if "dp_replicate" in (context.root_mesh.mesh_dim_names or ()):
            # ZeRO in copies: a sharded tensor has its own axes in place of `dp`.
            self._axes |= {"dp_replicate": DATA_AXIS, "dp_shard": DATA_AXIS}
        if context.layout.ep:  # so do experts
            self._axes |= {EXPERT_COPIES: DATA_AXIS, EXPERT_AXIS: DATA_AXIS}
        # Ranks whose servers have every parameter wait for nobody: a checkpoint alone compares.
        self.has_turns = not (config.servers and config.servers.staleness) or any(
            name not in excluded for name, _ in model.named_parameters()
        )
        saves = config.checkpoint.every if config.checkpoint else 0
        self._every = (_EVERY, saves) if saves else (_EVERY,)
        # Of the device, and of the host where tables are placed.
        self._weights: dict[torch.device, Tensor] = {}
        self._steps = 0
        self._has_warned = False
        self._has_rounded = False
        self.outside = OutsideParameters()
        take_given()  # of a model before this one
        take_numbers()
        take_written()
        self._optimizer: OptimizerRef | None = None
        self._given: Tensor | None = None

    def count_step(self, optimizer: OptimizerRef) -> None:
        """Compare replicas if it is time to; called before each step of an optimizer.

        Raises:
            ModelError: The model has gradients that no rank reduced.
            RanksDisagreeError: Replicas differ.
        """
        if not self.has_turns:
            return
        self._steps += 1
        if self._steps in _FIRST_STEPS or any(self._steps % every == 0 for every in self._every):
            self._check_reduced()
            self._optimizer = optimizer
            self.compare()
            self._optimizer = None

    def _check_reduced(self) -> None:
        model = self._model()
        if names := unreduced_gradients(model) if model is not None else []:
            raise ModelError(
                f"the optimizer steps without the gradient of {names[0]}, which is that of a "
                "gathered parameter and was not reduced",
                hint="set gradients of model.parameters() as they are after the backward pass, and "
                "end with a backward pass outside of rt.no_sync",
            )

    @torch.no_grad()
    def note_given(self, tensors: Iterable[Tensor]) -> None:
        """Note whole tensors of which each rank has taken its part, so all must have the same.

        Some elements of each are enough to notice a rank that was given others, or none.
        """
        given = torch.zeros((), dtype=torch.int64, device=self._context.device)
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            given = given * _GOLDEN + self._digest(flat[:: max(1, flat.numel() // _COLUMNS)])
        before = 0 if self._given is None else self._given
        self._given = (given + before * _GOLDEN).reshape(1)

    @torch.no_grad()
    def compare(self) -> None:
        """Compare replicas now; all ranks call it.

        Raises:
            RanksDisagreeError: Replicas differ.
        """
        self.has_compared = True
        named = dict(self._tensors())
        sums = {name: self._digest(tensor) for name, tensor in named.items()}
        groups = {axis: self._group(axis) for axis in self._axes}
        groups = {axis: group for axis, group in groups.items() if group.size() > 1}
        along = {
            axis: [name for name, tensor in named.items() if axis in self._replicated(tensor)]
            for axis in groups
        }
        differ = [self._differ([sums[n] for n in along[a]], group) for a, group in groups.items()]
        if not self._is_any(differ, groups.values()):
            return
        own = {name: int(digest) for name, digest in sums.items()}
        found = [
            self._difference({n: named[n] for n in along[axis]}, own, axis, group)
            for axis, group in groups.items()
        ]
        sentence = next(filter(None, found), "")
        of_ranks = messages.gather_all(sentence, str, None, self._context.device)
        sentence = next(filter(None, of_ranks), "")
        if sentence:
            raise RanksDisagreeError(sentence, hint=_hint(sentence))
        if self._has_rounded and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "msrun: replicas differ by rounding: ranks have unlike devices, or operators that "
                "sum in any order",
                stacklevel=2,
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        model = self._model()
        if model is None:
            return
        for name, param in model.named_parameters():
            if name not in self._excluded and _has_bits(param):
                yield name, param
        for name, buffer in model.named_buffers() if self._has_buffers else ():
            if _has_bits(buffer):
                yield name, buffer
        yield from self._of_script()

    def _of_script(self) -> Iterator[tuple[str, Tensor]]:
        """Return what the script gave this rank, as numbers, and what it trains by itself."""
        device = self._context.device
        yield from (pair for pair in self.outside.tensors() if _has_bits(pair[1]))
        if self._given is not None:
            yield _GIVEN, self._given
        if (given := take_given()) is not None:
            yield _COMPUTED, given.to(device)
        if (written := take_written()) is not None:
            yield _WRITTEN, written.to(device)
        if (numbers := take_numbers()) is not None:
            yield _NUMBERS, numbers.to(device)
        if self._optimizer and (optimizer := self._optimizer()):
            yield from _options(optimizer, device)
        if digest := self._context.batch.current.digest:
            yield _READ, torch.tensor([digest], device=device)

    def _replicated(self, tensor: Tensor) -> set[str]:
        """Return the axes along which ranks hold equal parts of `tensor`."""
        own = {name for name, whole in self._axes.items() if name == whole}
        if rows := rows_of(tensor):
            return own - {rows.axis}
        if not is_sharded(tensor):
            return own
        names = tensor.device_mesh.mesh_dim_names
        if names is None:
            return set()  # of a mesh of the script's own, whose axes are unknown here
        placed = zip(names, tensor.placements, strict=True)
        same = {name for name, placement in placed if placement.is_replicate()}
        # An axis that the tensor's own mesh lacks has a copy of it on every rank.
        covered = {self._axes.get(name, name) for name in names}
        return (same & self._axes.keys()) | (own - covered)

    def _group(self, axis: str) -> dist.ProcessGroup:
        if self._axes[axis] == axis:
            return self._context.group(axis)
        return self._context.root_mesh.get_group(axis)

    def _digest(self, tensor: Tensor) -> Tensor:
        """Return a number of the bits of `tensor`, and of where in it they are."""
        local = local_part(tensor).detach()
        local = torch.view_as_real(local) if local.is_complex() else local
        if local.dtype == torch.bool:
            local = local.to(torch.uint8)
        bits = local.contiguous().view(_INTEGERS[local.element_size()]).reshape(-1)
        weights = self._take_weights(bits.device)
        rows, rest = divmod(bits.numel(), _COLUMNS)
        total = bits.new_zeros((), dtype=torch.int64)
        if rows:
            columns = bits[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0, dtype=torch.int64)
            total = (columns * weights).sum()
        if rest:
            total = total + (bits[-rest:] * weights[:rest] * _GOLDEN).sum()
        return total.to(self._context.device)

    def _take_weights(self, device: torch.device) -> Tensor:
        """Return odd numbers, one a column: equal sums of other bits are then unlikely."""
        if device not in self._weights:
            # Made on the host: a new kind of device has the fewest kernels for integers.
            self._weights[device] = ((torch.arange(_COLUMNS) * 2 + 1) * _GOLDEN | 1).to(device)
        return self._weights[device]

    def _differ(self, sums: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
        """Return, on the device, whether ranks of `group` have other digests than this one."""
        device = self._context.device
        count = torch.tensor(len(sums), device=device)
        total = torch.zeros_like(count)
        if sums:
            order = (torch.arange(1, len(sums) + 1) * 2 + 1).to(device)
            total = (torch.stack(list(sums)) * order * _GOLDEN).sum()
        own = torch.stack([total, count])
        # The complement turns the order around: one maximum gives the largest and the smallest.
        extremes = torch.cat([own, ~own])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, smallest = extremes.chunk(2)
        return (largest != ~smallest).any()

    def _is_any(self, differ: Sequence[Tensor], groups: Collection[dist.ProcessGroup]) -> bool:
        """Return whether some ranks of the job differ, the same on all of them."""
        if not differ:
            return False
        flag = torch.stack(list(differ)).any().to(torch.int32)
        # Ranks of other groups cannot know otherwise, and would go on without those that raise.
        if [group.size() for group in groups] != [self._context.world_size]:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _difference(
        self,
        tensors: Mapping[str, Tensor],
        digests: Mapping[str, int],
        axis: str,
        group: dist.ProcessGroup,
    ) -> str | None:
        """Name the tensors that differ along `axis` by more than rounding; None without any."""
        own = {name: digests[name] for name in tensors}
        of_ranks = messages.gather_all(own, dict[str, int], group, self._context.device)
        names = list(dict.fromkeys(name for digest in of_ranks for name in digest))
        names = [n for n in names if len({digest.get(n) for digest in of_ranks}) > 1]
        common = [n for n in names if all(n in digest for digest in of_ranks)]
        limit = None if axis in _TO_THE_BIT else _GROSS
        rounded = {name for name in common if self._is_rounding(tensors[name], group, limit)}
        self._has_rounded = self._has_rounded or bool(rounded)
        # An optimizer of the script may step on some ranks alone.
        alone = {name for name in names if self.outside.is_name(name)}.difference(common)
        names = [name for name in names if name not in rounded | alone]
        if problem := self.outside.problem(names):
            return problem
        return _sentence(names, dist.get_process_group_ranks(group), of_ranks) if names else None

    def _is_rounding(self, tensor: Tensor, group: dist.ProcessGroup, limit: float | None) -> bool:
        """Return whether `tensor` differs by rounding from that of the first rank; all call it."""
        local = local_part(tensor).detach()
        if not local.is_floating_point():
            return False
        own = local.to(self._context.device, torch.float64).contiguous()
        first = own.clone()
        dist.broadcast(first, dist.get_process_group_ranks(group)[0], group=group)
        units = _ROUNDING_UNITS * torch.finfo(local.dtype).eps
        is_same = (own == first) | (own.isnan() & first.isnan())
        gap = torch.where(is_same, 0.0, (own - first).abs()).max()
        scale = first.nan_to_num(0.0, 0.0, 0.0).abs().max()
        # Written so that a gap of nan is no rounding.
        apart = torch.where(gap <= scale * (limit or units), 0.0, 1.0)
        dist.all_reduce(apart, dist.ReduceOp.MAX, group=group)
        return not bool(apart)


_HINT = (
    "change weights before rt.shard, or on all ranks alike; average what forward writes into a "
    "buffer with all_reduce of msrun.parallel.collectives, or say `batch_norm: local` to leave "
    "each rank its own buffers"
)
_HINT_COMPUTED = (
    "draw such noise with one seed on all ranks (torch.Generator().manual_seed(step)), and average "
    "what each rank computed from its own samples with rt.mean_over_data"
)
_HINT_READ = (
    "every rank reads the whole stream: let the dataset shuffle and draw with one seed on all ranks"
)


def _options(
    optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Return the numbers in the options of an optimizer, each of all groups together."""
    found: dict[str, list[float]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            numbers = [float(v) for v in values if _is_number(v)]
            if numbers:
                found.setdefault(name, []).extend(numbers)
    for name, numbers in found.items():
        yield f"{_OPTION}{name}", torch.tensor(numbers, dtype=torch.float64).to(device)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _hint(sentence: str) -> str:
    """Return what to do about `sentence`."""
    outside = OutsideParameters.hint_for(sentence)
    if _COMPUTED in sentence or _NUMBERS in sentence or _OPTION in sentence:
        return _HINT_COMPUTED
    return outside or (_HINT_READ if _READ in sentence else _HINT)


def _has_bits(tensor: Tensor) -> bool:
    """Return whether `tensor` has memory of its own in which to compare bits."""
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_dense and tensor.numel() > 0


def _sentence(
    names: Sequence[str], ranks: Sequence[int], of_ranks: Sequence[Mapping[str, int]]
) -> str:
    """Name the first tensors, and the ranks whose tensors are not those of most ranks."""
    parts = []
    for name in names[:_NAMES_SHOWN]:
        digests = [digest.get(name) for digest in of_ranks]
        usual = max(digests, key=digests.count)
        others = [str(r) for r, digest in zip(ranks, digests, strict=True) if digest != usual]
        shown = ", ".join(others[:_NAMES_SHOWN]) + " ..." * (len(others) > _NAMES_SHOWN)
        parts.append(f"{name} (rank{'s' * (len(others) > 1)} {shown})")
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"ranks have other values of {', '.join(parts)}{more}, which must be equal on all ranks"
