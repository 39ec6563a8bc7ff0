"""Modules under a plan that `torch.compile` compiles, guard included."""
