"""Parameters that pack several projections are saved and loaded in any layout."""

import pytest
import torch
from plan_stand_ins import build, token_loss
from ranks import run_warm

import msrun

pytestmark = pytest.mark.torch

LAYOUTS = {
    "one": (1, {}),
    "tp": (2, {"mesh": {"tp": 2}, "plan": "auto_tp"}),
    "zero": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": "auto_tp", "optimizer": {"zero": 1}}),
}


def step_from(name, config, path, *, is_first):
    """Train a step, after loading unless it is the first, which is saved; return the loss."""
    rt = msrun.init(config)
    model = rt.shard(build(name))
    update = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    if not is_first:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        rt.load(model, update, path=path)
    draw = torch.Generator().manual_seed(5 + is_first)
    tokens, target = torch.randint(0, 32, (2, 4, 6), generator=draw)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    part = [t.chunk(count)[share] for t in (tokens, target)]
    loss = rt.step(model, update, token_loss, *part)
    if is_first:
        rt.save(model, update, step=1, path=path)
    return loss.item()


def first_step(name, config, path):
    return step_from(name, config, path, is_first=True)


def second_step(name, config, path):
    return step_from(name, config, path, is_first=False)


@pytest.mark.parametrize(
    "name", ["fused", *(pytest.param(n, marks=pytest.mark.slow) for n in ("conv1d", "experts"))]
)
def test_packed_parameters_are_saved_and_loaded_in_any_layout(name, tmp_path):
    seconds = {}
    for saver, (ranks, config) in LAYOUTS.items():
        path = str(tmp_path / saver)
        run_warm(first_step, ranks, name, config, path)
        for loader, (readers, other) in LAYOUTS.items():
            seconds[saver, loader] = run_warm(second_step, readers, name, other, path)[0]

    assert seconds == dict.fromkeys(seconds, pytest.approx(seconds["one", "one"], abs=1e-6))
