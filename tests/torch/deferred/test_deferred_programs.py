"""Random programs of what constructors do have one outcome, with memory and without."""

import random

import pytest
import torch

from msrun.parallel.deferred.init import DeferredInit, materialize

pytestmark = pytest.mark.torch

OUTSIDE = torch.arange(12.0).view(3, 4)


class Program:
    """Makes, writes and forgets tensors of 3 x 4, as random numbers of its own say."""

    def __init__(self, seed):
        self.choices = random.Random(seed)
        self.generators = [torch.Generator().manual_seed(self.choices.randrange(3)) for _ in "ab"]
        self.states = []
        self.tensors = [torch.rand(3, 4), torch.empty(3, 4).zero_(), OUTSIDE * 2]
        for _ in range(self.choices.randrange(5, 40)):
            self.choices.choice(STEPS)(self)

    def any(self):
        return self.choices.choice(self.tensors)

    def part(self):
        whole = self.any()
        return self.choices.choice([whole, whole, whole[1], whole[:, 1:3], whole.t(), whole[::2]])

    def generator(self):
        return self.choices.choice([*self.generators, None])

    def new(self):
        self.tensors.append(torch.randn(3, 4, generator=self.generator()))

    def constant(self):
        self.tensors.append(torch.tensor([[self.choices.random()] * 4] * 3))

    def clone(self):
        self.tensors.append(self.any().clone())

    def bernoulli(self):
        self.tensors.append(torch.bernoulli(self.any().sigmoid()))

    def forget(self):
        if len(self.tensors) > 2:
            self.tensors.pop(self.choices.randrange(len(self.tensors)))

    def uniform(self):
        self.part().uniform_(generator=self.generator())

    def zero(self):
        self.part().zero_()

    def scale(self):
        self.part().mul_(1.5)

    def add(self):
        self.part().add_(self.part().sum())

    def copy(self):
        self.any().copy_(self.any())

    def output(self):
        torch.mul(self.any(), self.any(), out=self.any())

    def replace(self):
        self.any().data = self.any().data.clone()

    def branch(self):
        part = self.part()
        part.normal_() if part.sum().item() > 0 else part.add_(1)

    def seed(self):
        torch.manual_seed(self.choices.randrange(5))

    def save(self):
        self.states.append(torch.get_rng_state())

    def restore(self):
        if self.states:
            torch.set_rng_state(self.choices.choice(self.states))

    def fork(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.choices.randrange(4))
            self.part().uniform_()


STEPS = [
    step
    for name, step in vars(Program).items()
    if name[0] != "_" and name not in ("any", "generator", "part")
]


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_programs_have_one_outcome(first):
    for seed in range(first, first + 20):
        torch.manual_seed(7)
        expected, after = Program(seed), torch.get_rng_state()
        torch.manual_seed(7)
        block = DeferredInit()
        with block:
            program = Program(seed)
        views = {index: block.log.view(tensor) for index, tensor in enumerate(program.tensors)}
        for part in (dict(list(views.items())[::2]), views):
            found = {}

            def take(name, tensor, found=found):
                found[name] = tensor.clone()

            materialize(block.log, part, take)

            assert all(torch.equal(expected.tensors[i], found[i]) for i in part), seed
            assert torch.equal(torch.get_rng_state(), after), seed
        for own, other in zip(program.generators, expected.generators, strict=True):
            assert torch.equal(own.get_state(), other.get_state()), seed
