"""Experts of a `ModuleList`: each rank keeps some of its members, and rows travel to them.

The problem.  Many models hold their experts as a list of modules.  The forward around it, of the
*mixture*, picks the rows of an expert, calls it, weights what it returns and adds it up, in a loop
of its own kind that calls those experts that have rows on this rank.  Other ranks cannot know
which these are, so a call of an expert cannot exchange anything: ranks would wait for each other.

The idea.  The forward of the mixture runs twice.  In the rehearsal a call of an expert notes its
rows and returns zeros.  Then all rows travel at once, each rank's experts compute, and the results
travel back (`list_exchange`).  In the second run a call of an expert returns them.  Other modules
of the mixture, such as its router, run in the rehearsal alone, and shared experts that are called
after the others while rows travel (`rehearsal`).

What it assumes, tried in the first call that has rows: what an expert gets does not depend on what
another one returned, and it treats each row apart.

Invariants:

- Each rank takes part in the exchanges of each call of a mixture, forward and backward, also
  without rows: then the output of the mixture depends on them by zeros.
- An expert that no rank calls has no gradient, as in one process; one that is called without rows
  has zeros.
- Parameters are `held.ExpertPart`: all names on all ranks, all rows on one.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.autocast.casts import without_cache
from msrun.parallel.experts.arguments import plain_of
from msrun.parallel.experts.held import hold, readable, refuse_torchs_own
from msrun.parallel.experts.list_exchange import INPUTS_MAX, ExchangeSettings, ExpertCall, exchange
from msrun.parallel.experts.probe import check_rows_apart, evaluating
from msrun.parallel.experts.rehearsal import Depending, Learned, Rehearsal, copied
from msrun.parallel.local import is_equal
from msrun.parallel.losses.batch import map_leaves, tensors_in
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS

# Of each call, and what joins the backward pass of a rank without one.
Results = tuple[list[Tensor], Tensor | None]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def divide(
    model: nn.Module,
    name: str,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    share: float,
    is_kept: bool,
) -> list[nn.Module]:
    """Leave each rank its members of the list `name` of `model`, in place.

    Args:
        model: The model, equal on all ranks.
        name: Of a list or mapping of experts.
        mesh: Its last axis is that of experts.
        device: Of this rank.
        share: Factor of the gradients of experts.
        is_kept: Whether recomputation keeps results of collectives.

    Returns:
        The modules of the experts that have parameters.
    """
    members, mixture, mixture_name = list_of_experts(model, name)
    ranks = mesh.size(mesh.ndim - 1)
    bounds = [len(members) * rank // ranks for rank in range(ranks + 1)]
    owned = [range(first, last) for first, last in itertools.pairwise(bounds)]
    listed = list(members.values())
    call = partial(exchange, name, ExchangeSettings(owned, share, is_kept=is_kept))
    experts = ListedExperts(name, listed, owned, mesh, device=device, exchange=call)
    hold(
        [f"{name}.{key}" for key in members],
        experts.members,
        [rank for rank, part in enumerate(owned) for _ in part],
        mesh,
        experts.is_running,
    )
    mixture.forward = _MixtureForward(mixture_name, mixture, experts)
    return [part for member in experts.members for part in member.modules()]


class ListOfExperts(NamedTuple):
    """A list of experts.

    Args:
        members: Those that have parameters, by name.
        mixture: The module whose forward calls them.
        mixture_name: Its name.
    """

    members: dict[str, nn.Module]
    mixture: nn.Module
    mixture_name: str


def list_of_experts(model: nn.Module, name: str) -> ListOfExperts:
    """Return the list `name` of `model`.

    Raises:
        ModelError: Ranks cannot share its members.
    """
    container = model.get_submodule(name)
    members = {
        key: child
        for key, child in container.named_children()
        if any(True for _ in child.parameters())
    }
    mixture, mixture_name = _mixture(model, name, container)
    _check(model, name, members)
    if norm := next((key for key, part in mixture.named_modules() if isinstance(part, _NORMS)), ""):
        raise ModelError(
            f"{name} of style experts over {EXPERT_AXIS}: {norm} is a batch norm beside the "
            "experts, and ranks without rows for experts would meet there at another time",
            hint="normalise outside of the module that has the list",
        )
    return ListOfExperts(members, mixture, mixture_name)


def _mixture(model: nn.Module, name: str, container: nn.Module) -> tuple[nn.Module, str]:
    """Return the module whose forward calls the experts, and its name."""
    owner = name
    if type(container).forward is nn.Module.forward:
        owner = name.rpartition(".")[0]
    module = model.get_submodule(owner)
    if type(module).forward is nn.Module.forward or isinstance(module, nn.Sequential):
        raise ModelError(
            f"{name} of style experts over {EXPERT_AXIS}: {owner or 'the model'} has no forward of "
            "its own that could call its members",
            hint="the list belongs to the module whose forward picks the rows of each expert",
        )
    if isinstance(module.forward, _MixtureForward):
        raise ModelError(
            f"{name} of style experts over {EXPERT_AXIS}: {owner or 'the model'} has another list "
            "of experts already",
            hint="make one list of modules that have what both lists have of an expert",
        )
    return module, owner


def _check(model: nn.Module, name: str, members: Mapping[str, nn.Module]) -> None:
    """Refuse members that are not alike, or have what is more than theirs alone."""
    shapes = {
        key: [(path, param.shape) for path, param in member.named_parameters()]
        for key, member in members.items()
    }
    first = next(iter(members), "")
    where = f"{name} of style experts over {EXPERT_AXIS}"
    own = {id(param) for member in members.values() for param in member.parameters()}
    outside = sum(id(p) in own for _, p in model.named_parameters(remove_duplicate=False))
    for key, member in members.items():
        if type(member) is not type(members[first]) or shapes[key] != shapes[first]:
            raise ModelError(
                f"{where}: {key} ({type(member).__name__}) has other parameters than {first} "
                f"({type(members[first]).__name__}), and ranks have experts of one kind"
            )
        if buffer := next((path for path, _ in member.named_buffers()), None):
            raise ModelError(
                f"{where}: {key} has the buffer {buffer}, which one rank alone would change"
            )
        for path, param in member.named_parameters():
            if not param.dim():
                raise ModelError(f"{where}: {key}.{path} has no dim, so no rank can lack it")
            if any(torch_compat.gradient_hooks(param)):
                raise ModelError(
                    f"{where}: {key}.{path} has a hook on its gradient, which one rank has",
                    hint="leave the hook or the rule out",
                )
    if not own or outside != len(own):
        raise ModelError(
            f"{where}: members have no parameters, or share them with each other or other modules"
        )


class ListedExperts:
    """The experts of one list, of which this rank has some.

    Args:
        name: Of the list.
        members: All experts.
        owned: Those of each rank.
        mesh: Its last axis is that of experts.
        device: Of this rank.
        exchange: Of their rows.
    """

    def __init__(
        self,
        name: str,
        members: list[nn.Module],
        owned: list[range],
        mesh: DeviceMesh,
        *,
        device: torch.device,
        exchange: Callable[..., Results],
    ) -> None:
        self.name, self.members, self.device = name, members, device
        self._mesh, self._exchange = mesh, exchange
        part = owned[mesh.get_local_rank(EXPERT_AXIS)]
        self.own = members[part.start : part.stop]
        self._calls = [torch_compat.call_of(member) for member in self.own]
        self._is_running = False
        self._is_tried = False
        self._empty: dict[object, Tensor] = {}
        self._signature = inspect.signature(members[0].forward)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Refuse what reads parameters of experts inside; only calls of experts do."""
        self._calls = [torch_compat.call_of(member) for member in self.own]
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def is_running(self) -> bool:
        """Return whether the mixture runs."""
        return self._is_running

    def is_trained(self) -> bool:
        """Return whether some expert of the list is, on any rank."""
        return any(param.requires_grad for each in self.members for param in each.parameters())

    def empty(self, kinds: Sequence[tuple[int, torch.dtype]]) -> Tensor:
        """Return a result without rows, for tensors of these widths and types."""
        is_cast = torch.is_autocast_enabled(self.device.type)
        key = (*kinds, is_cast)
        if key not in self._empty:
            rows = [torch.zeros(1, width, dtype=d, device=self.device) for width, d in kinds]
            with torch.no_grad(), evaluating(self.own[0]), readable(self.own[:1]):
                self._empty[key] = self._checked(self._calls[0](*rows), 1)[:0]
        return self._empty[key]

    def compute(self, place: int, rows: tuple[Tensor, ...]) -> Tensor:
        """Return what the expert at `place` among those of this rank makes of `rows`."""
        call = self._calls[place]
        with readable(self.own[place : place + 1]):
            if not self._is_tried and len(rows[0]) > 1:
                name = f"{self.name} of style experts over {EXPERT_AXIS}"
                with evaluating(self.own[place]):
                    self._is_tried = check_rows_apart(name, call, rows)
            return self._checked(call(*rows), len(rows[0]))

    def rows_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of a call of an expert, by position.

        Raises:
            ModelError: It is called with something else.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ModelError(f"{self.name}: {error}") from None
        values = [plain_of(value) for value in bound.args]
        lead = {x.shape[:-1] for x in values if isinstance(x, Tensor) and x.dim()}
        is_right = values and all(isinstance(x, Tensor) and x.dim() for x in values)
        if bound.kwargs or not is_right or len(lead) > 1 or len(values) > INPUTS_MAX:
            shown = ", ".join(
                str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
                for x in (*values, *bound.kwargs.values())
            )
            raise ModelError(
                f"{self.name} of style experts over {EXPERT_AXIS}: an expert was called with "
                f"{shown or 'nothing'}; it takes up to {INPUTS_MAX} tensors (rows, ..., width) "
                "with as many rows each"
            )
        return values

    def results(self, calls: Sequence[ExpertCall], beside: Callable[[], None]) -> Results:
        """Return what `calls` return, computed by the ranks of their experts; see `exchange`."""
        group = self._mesh.get_group(EXPERT_AXIS)
        return self._exchange(calls, group, self, beside)

    def agreed(self, numbers: Tensor) -> list[int]:
        """Return the largest of each number on all ranks."""
        numbers = numbers.to(self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._mesh.get_group(EXPERT_AXIS))
        return list(map(int, numbers.tolist()))

    def _checked(self, output: Any, rows: int) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != rows:  # noqa: PLR2004
            is_tensor = isinstance(output, Tensor)
            shown = tuple(output.shape) if is_tensor else f"a {type(output).__name__}"
            raise ModelError(
                f"{self.name} of style experts over {EXPERT_AXIS}: an expert returns {shown} for "
                f"{rows} rows: it has to return one tensor with as many"
            )
        return output


class _MixtureForward:
    """The forward of a mixture whose experts are a list.

    Args:
        name: Of the mixture.
        module: The mixture.
        experts: Of which this rank has some.
    """

    def __init__(self, name: str, module: nn.Module, experts: ListedExperts) -> None:
        self._name, self._module, self._experts = name or "the model", module, experts
        self._learned, self._is_compared = Learned(), False
        self.__wrapped__ = module.forward  # `inspect.signature` follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        experts = self._experts
        if not self._learned.is_known:
            self._try(args, kwargs)
        run = self._rehearsal()
        noted = _Noted(experts, run)
        with experts.running():
            notes = {m: partial(noted.note, at) for at, m in enumerate(experts.members)}
            with run.rehearsing(), torch_compat.calls_replaced(notes):
                self.__wrapped__(*copied(args), **copied(kwargs))
            results, joined = experts.results(noted.calls, run.run_beside)
            answers = _Answers(noted, results, run.differs, is_compared=not self._is_compared)
            answered = {m: partial(answers.answer, at) for at, m in enumerate(experts.members)}
            with run.repeating(), torch_compat.calls_replaced(answered):
                output = self.__wrapped__(*args, **kwargs)
        answers.end()
        self._is_compared = self._is_compared or bool(noted.calls)
        return _joined(output, joined) if joined is not None and not noted.calls else output

    def _rehearsal(self, depending: Depending | None = None) -> Rehearsal:
        members, device = self._experts.members, self._experts.device
        return Rehearsal(self._name, self._module, members, self._learned, device, depending)

    @torch.no_grad()
    def _try(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Learn in a trial which modules come after the experts; all ranks call it together."""
        experts = self._experts
        refuse_torchs_own(experts.members)
        run = self._rehearsal(Depending())
        noted = _Noted(experts, run)
        notes = {m: partial(noted.note, at) for at, m in enumerate(experts.members)}
        with (
            experts.running(),
            run.rehearsing(),
            torch_compat.calls_replaced(notes),
            without_cache(),
        ):
            self.__wrapped__(*copied(args), **copied(kwargs))
        run.learn(experts.agreed(run.shown()))


class _Noted:
    """Calls of experts in a rehearsal."""

    def __init__(self, experts: ListedExperts, run: Rehearsal) -> None:
        self._experts, self._run = experts, run
        self._is_training = torch.is_grad_enabled()
        self.calls: list[ExpertCall] = []
        self.leads: list[torch.Size] = []

    def note(self, expert: int, *args: Any, **kwargs: Any) -> Tensor:
        """Note the rows of a call, and return something in place of a result."""
        self._run.note_expert()
        if torch.is_grad_enabled() != self._is_training:
            raise ModelError(
                f"{self._experts.name} of style experts over {EXPERT_AXIS}: the forward around it "
                "calls an expert with gradients switched on or off",
                hint="freeze the experts by requires_grad_(False) instead",
            )
        values = self._experts.rows_of(args, kwargs)
        self.leads.append(values[0].shape[:-1])
        self.calls.append(ExpertCall(expert, tuple(x.reshape(-1, x.size(-1)) for x in values)))
        like = self._experts.empty([(x.size(-1), x.dtype) for x in values])
        found = like.new_zeros((*self.leads[-1], like.size(1)))
        if depending := self._run.depending:
            if depending.has(values):
                raise self._chained(expert)
            depending.add(found)
        return found

    def rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of a call."""
        return self._experts.rows_of(args, kwargs)

    @torch.no_grad()
    def compare(self, at: int, values: Sequence[Tensor]) -> None:
        """Refuse rows of the second run that are others than those of the rehearsal."""
        pairs = zip(values, self.calls[at].rows, strict=True)
        if not all(is_equal(x.reshape(-1, x.size(-1)), rows) for x, rows in pairs):
            raise self._chained(self.calls[at].expert)

    def _chained(self, expert: int) -> ModelError:
        return ModelError(
            f"{self._experts.name} of style experts over {EXPERT_AXIS}: what expert {expert} gets "
            "depends on what another one returned, or differs when the forward around them runs "
            "again",
            hint="experts on ranks compute at the same time: let each have all that it does in its "
            "own forward",
        )


class _Answers:
    """Results for the calls of the second run, in their order."""

    def __init__(
        self,
        noted: _Noted,
        results: Sequence[Tensor],
        differs: Callable[[], ModelError],
        *,
        is_compared: bool,
    ) -> None:
        self._noted, self._results, self._differs = noted, results, differs
        self._is_compared = is_compared
        self._next = 0

    def answer(self, expert: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of the next call, which has to be that of the rehearsal."""
        noted, at = self._noted, self._next
        values = noted.rows(args, kwargs)
        if at == len(noted.calls) or (expert, values[0].shape[:-1]) != (
            noted.calls[at].expert,
            noted.leads[at],
        ):
            raise self._differs()
        if self._is_compared:
            noted.compare(at, values)
        self._next += 1
        found: Tensor = self._results[at]
        return found.reshape(*noted.leads[at], found.size(-1))

    def end(self) -> None:
        """Refuse a second run with fewer calls."""
        if self._next < len(self._noted.calls):
            raise self._differs()


def _joined(output: Any, joined: Tensor) -> Any:
    """Return `output`, whose first tensor depends on `joined` by zeros."""
    first = next((x for x in tensors_in(output) if x.is_floating_point()), None)
    if first is None:
        return output
    return map_leaves(lambda x: _Joined.apply(x, joined) if x is first else x, output)  # type: ignore[no-untyped-call]


class _Joined(Function):
    """Returns a tensor; the backward pass goes to another one too, with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.other = other.shape, other.dtype, other.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.other
        return gradient, torch.zeros(shape, dtype=dtype, device=device)
