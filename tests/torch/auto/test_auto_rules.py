"""Every rule of the search is true: each choice computes what one process does, and as DTensor."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from auto_rules import CALLS, Call
from ranks import run_ranks, run_warm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.graph.axis_placement import PR, RR, SHARD_CODES
from msrun.parallel.search.graph.operators import _MAKERS as OPERATORS
from msrun.parallel.search.graph.random_ops import DRAWING, draw_of
from msrun.parallel.search.graph.rules import Site, dim_labels, split_by_labels
from msrun.parallel.search.graph.unsupported_ops import REFUSED
from msrun.parallel.search.graph.views import _MAKERS as VIEWS
from msrun.parallel.search.graph.views import dim_map
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.problem import Setting

pytestmark = pytest.mark.torch

RANKS = 2
PARTS = 2
SETTING = Setting(sizes=(RANKS,), topology=PRESETS["cpu"])
PACKETS = sorted({packet for packet, *_ in CALLS})
# Choices of ours that DTensor answers otherwise than we do, and why ours are right all the same:
# each of them is run by `test_choices_compute_what_one_process_does`.
_CHANNELS = "DTensor divides convolutions by sample alone"
_UNKNOWN = "DTensor has no rule, or one for whole tensors alone"
_SUMS = "DTensor adds up before; a linear operator can as well behind"
_NEW = "DTensor makes dims whole that are new; each rank can make its part"
UNLIKE = {
    "batch_norm": {"b": "DTensor gathers the samples; statistics can be summed over ranks instead"},
    "broadcast_to": {"d0": _NEW, "d2": _NEW},
    "clone": {"P": _SUMS},
    "conv1d": {"k": _CHANNELS, "n": _CHANNELS},
    "conv2d": {"g": _CHANNELS, "k": _CHANNELS, "n": _CHANNELS},
    "conv3d": {"k": _CHANNELS, "n": _CHANNELS},
    "conv_transpose1d": {"k": _CHANNELS, "n": _CHANNELS},
    "conv_transpose2d": {"g": _CHANNELS},
    "conv_transpose3d": {"k": _CHANNELS, "n": _CHANNELS},
    "cross_entropy_loss": {"b": "DTensor adds up what smoothed or ignored targets weigh before"},
    "expand": {"d0": _NEW, "d2": _NEW},
    "expand_as": {"d1": _NEW},
    "mean": {"P": _SUMS},
    "pad": {"d0": _UNKNOWN, "d1": _UNKNOWN},
    "repeat_interleave": {"P": _SUMS},
    "select_scatter": {"P": _SUMS},
    "slice_scatter": {"P": _SUMS},
    "tril": {"P": _SUMS, "d0": _UNKNOWN},
    "triu": {"P": _SUMS, "d0": _UNKNOWN},
}
# DTensor has no rule for the kernel that a CPU takes, and none for most random operators.
NOT_IN_DTENSOR = {"scaled_dot_product_attention", *DRAWING, *(f"{name}_" for name in DRAWING)}


class Trial:
    """One call, of which one operator is tried.

    Args:
        packet: The operator; of a view, the one that reads it.
        given: Function and inputs.
        terms: As of `Call`.
    """

    def __init__(self, packet, *given, terms=0):
        function, *inputs = given
        self.function, self._inputs, self._terms = function, inputs, terms
        if packet in VIEWS:
            packet, self.function = "relu", lambda *xs: torch.relu(function(*xs))
        self.traced = trace(self.make(), ())
        self.program = self.traced.program
        self.makers = {name: step for step in self.program.steps for name in step.outputs}
        self.problem = build(self.program, SETTING)
        self.step = [s for s in self.program.steps if s.packet == packet][-1]
        self.rules = {node.name: node.rule for node in self.problem.nodes}

    def make(self):
        return Call(self.function, *self._inputs, terms=self._terms).double()

    @property
    def choices(self):
        return self.rules[self.step.name].choices

    def plan(self, number):
        """Return a plan in which that operator alone is divided, and what its sums come from."""
        plan = {node.name: (0,) for node in self.problem.nodes} | {self.step.name: (number,)}
        for name, code in zip(self.step.inputs.values(), self.choices[number].ins, strict=True):
            if code == PR:
                self._part(name, plan)
        return plan

    def _part(self, name, plan):
        """Have `name` be a sum to which each rank adds the terms it has."""
        while name in self.makers:
            step = self.makers[name]
            names = [choice.name for choice in self.rules[step.name].choices]
            wanted = "d0" if step.target.startswith("aten.sum.") else "P"
            if wanted not in names:
                return
            plan[step.name] = (names.index(wanted),)
            name = next(iter(step.inputs.values()))

    def run(self, number, mesh):
        """Return outputs and gradients under a plan."""
        net, plan = self.make(), self.plan(number)
        run = Executor(net, self.traced, self.rules, plan, setting=SETTING, mesh=mesh, seed=0)
        return results(net, run)

    def alone(self):
        """Return the same of one process."""
        net = self.make()
        return results(net, net)


def results(net, run):
    """Return outputs, and gradients of a sum to which each element adds something else."""
    found = listed(run())
    numbers = torch.Generator().manual_seed(5)
    open_ends = [x for x in found if x.requires_grad]
    terms = [(x * torch.rand(x.shape, generator=numbers, dtype=x.dtype)).sum() for x in open_ends]
    if terms:
        torch.stack([term.double() for term in terms]).sum().backward()
    # Nobody asks for the gradient of what a result does not depend on.
    gradients = [torch.zeros(1) if p.grad is None else whole(p.grad) for p in net.parameters()]
    return [*found, *gradients]


def listed(made):
    return list(made) if isinstance(made, (tuple, list)) else [made]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def is_equal(a, b):
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


def misses(packet, mesh, change=None):
    """Return the choices of an operator that compute something else than one process."""
    wrong = []
    for call in [call for call in CALLS if call[0] == packet]:
        plain, summed = Trial(*call), Trial(*call, terms=RANKS)
        for trial in (plain, summed) if change else ():
            change(trial)
        for number, choice in enumerate(plain.choices):
            trial = summed if PR in choice.ins else plain
            # The executor draws numbers of its own.
            want = trial.run(0, mesh) if draw_of(trial.step) else trial.alone()
            if not all(map(is_equal, trial.run(number, mesh), want)):
                wrong.append(choice.name)
    return wrong


def on_two_ranks(packet):
    warnings.simplefilter("ignore")
    return misses(packet, init_device_mesh("cpu", (RANKS,)))


@pytest.mark.parametrize("packet", PACKETS)
@pytest.mark.few(38)
def test_choices_compute_what_one_process_does(packet):
    assert run_warm(on_two_ranks, RANKS, packet) == [[]] * RANKS


def test_every_rule_is_tried():
    assert not REFUSED & set(OPERATORS)
    assert set(PACKETS) == set(OPERATORS) | set(VIEWS)


def with_false_rule(trial):
    """Have `softmax` be divided along its own dim, and a sum pass through it."""
    site = Site(trial.step, trial.program)
    labels = dim_labels(3)
    trial.rules[trial.step.name] = split_by_labels(site, [labels], [labels], linear=[[0]])


def on_two_ranks_falsely():
    return misses("softmax", init_device_mesh("cpu", (RANKS,)), with_false_rule)


def test_a_false_rule_is_found():
    assert run_ranks(on_two_ranks_falsely, RANKS) == [["d1", "P"]] * RANKS


# Beside DTensor.


def against_dtensor(packets):
    """Return the choices that DTensor answers otherwise, by operator."""
    warnings.simplefilter("ignore")
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {}
    for call in CALLS:
        if call[0] in packets:
            trial = Trial(*call)
            asked = [c for c in trial.choices if None not in given(trial, c).values()]
            unlike = {c.name for c in asked if not is_alike(trial, c, mesh)}
            found.setdefault(call[0], set()).update(unlike)
    return {packet: sorted(names) for packet, names in found.items() if names}


def is_alike(trial, choice, mesh):
    """Return whether DTensor makes the same placements of the same, and sends nothing."""
    net = trial.make()
    codes = given(trial, choice)
    inputs = [placed(getattr(net, name).detach(), codes.get(name, RR), mesh) for name in net.names]
    try:
        with CommDebugMode() as sent:
            made = listed(net.function(*inputs))
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    wanted = [placement(code) for code in choice.outs]
    pairs = zip([x.placements[0] for x in made], wanted, strict=True)
    # A mean is a pending mean there, and a sum of shares here.
    is_same = all(a == b or (a.is_partial() and b.is_partial()) for a, b in pairs)
    return is_same and sent.get_total_counts() == 0


def given(trial, choice):
    """Return the code of each input of the call, behind what is done to it before.

    None where a view cannot pass it on, and the reader takes its part of what is whole.
    """
    full = {**trial.program.params, **trial.traced.buffers}
    found = {}
    for name, code in zip(trial.step.inputs.values(), choice.ins, strict=True):
        root, at = name, code
        while root in trial.makers:
            step = trial.makers[root]
            view = dim_map(Site(step, trial.program))
            if view is not None and at is not None and at < SHARD_CODES:
                at, _ = view.dims.get(at, (None, 1))
            root = next(iter(step.inputs.values()), "")
        found[full.get(root, "")] = at
    return found


def placement(code):
    return Shard(code) if code < SHARD_CODES else Partial() if code == PR else Replicate()


def placed(x, code, mesh):
    if code == PR:
        return DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return distribute_tensor(x, mesh, [placement(code)], src_data_rank=None)


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_choices_are_dtensors_or_it_is_known_why_not(part):
    packets = [packet for packet in PACKETS if packet not in NOT_IN_DTENSOR][part::PARTS]
    (found,) = run_ranks(against_dtensor, 1, packets)
    assert found == {packet: sorted(UNLIKE[packet]) for packet in packets if packet in UNLIKE}
