"""Nets of signals and volumes in parts, alone and with all else, learn what one process learns."""

import pytest
import torch
from ranks import run_warm
from signal_models import trained

from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

H2, H3, DP_H = {"mesh": {"h": 2}}, {"mesh": {"h": 3}}, {"mesh": {"dp": 2, "h": 2}}
DEPTH, DW, DHW = {"mesh": {"d": 2}}, {"mesh": {"d": 2, "w": 2}}, {"mesh": {"d": 2, "h": 2, "w": 2}}


def recompute(name):
    modules = ["blocks.*"] if name.startswith("audio") else ["down?", "up?"]
    return {"recompute": {"modules": modules}}


def zero(level, **options):
    return {"optimizer": {"zero": level, **options}}


# Model, ranks, configuration; `accumulate` is that of one process, too.
CASES = {
    "audio": ("audio", 2, H2),
    "audio over 3": ("audio", 3, H3),
    "audio, dp": ("audio", 4, DP_H),
    "audio, zero 1": ("audio", 2, {**H2, **zero(1)}),
    "audio, zero 2": ("audio", 2, {**H2, **zero(2)}),
    "audio, zero 3": ("audio", 2, {**H2, **zero(3)}),
    "audio, recompute": ("audio", 2, {**H2, **recompute("audio")}),
    "words": ("words", 2, H2),
    "words over 3, zero 3": ("words", 3, {**H3, **zero(3)}),
    "words, dp, zero 2": ("words", 4, {**DP_H, **zero(2)}),
    "volume": ("volume", 2, DEPTH),
    "volume, two axes": ("volume", 4, DW),
    "volume, three axes": ("volume", 8, DHW),
    "volume, zero 1": ("volume", 2, {**DEPTH, **zero(1)}),
    "volume, dp, zero 3": ("volume", 4, {"mesh": {"dp": 2, "w": 2}, **zero(3)}),
    "volume, recompute": ("volume", 2, {**DEPTH, **recompute("volume")}),
    "all of audio": (
        "audio in groups",
        2,
        {**H2, **zero(3), **recompute("audio"), "accumulate": 2},
    ),
    "all of audio, dp, zero 2": (
        "audio in groups",
        4,
        {**DP_H, **zero(2), **recompute("audio"), "accumulate": 2},
    ),
    "all of volume, zero 1": (
        "volume in groups",
        4,
        {**DW, **zero(1), **recompute("volume"), "accumulate": 2},
    ),
    "all of volume, zero 3": (
        "volume in groups",
        4,
        {"mesh": {"dp": 2, "h": 2}, **zero(3), **recompute("volume"), "accumulate": 2},
    ),
    "small buckets": ("audio in groups", 4, {**DP_H, "reduce": {"fuse": "1KiB"}}),
    "optimizer on the host": ("audio", 2, {**H2, **zero(3, offload=True)}),
}
IN_CI = ("volume, zero 1",)


@pytest.fixture(scope="module")
def alone():
    """Return what one process learns, by model; each is trained once."""
    known = {}

    def of(name, accumulate, max_norm=None):
        key = name, accumulate, max_norm
        if key not in known:
            known[key] = run_warm(trained, 1, {"accumulate": accumulate}, name, None, max_norm)[0]
        return known[key]

    return of


def assert_equal(found, expected, losses=3):
    assert found[0].tolist() == pytest.approx(expected[0][-losses:].tolist(), abs=1e-9)
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in IN_CI)) for c in CASES]
)
def test_signals_and_volumes_in_parts_learn_what_one_process_learns(case, alone):
    name, ranks, config = CASES[case]
    for found in run_warm(trained, ranks, config, name):
        assert_equal(found, alone(name, config.get("accumulate", 1)))


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_norms_of_gradients_of_parts_are_clipped_as_in_one_process(level, alone):
    config = {**DP_H, **zero(level)}
    for found in run_warm(trained, 4, config, "audio", None, 0.05):
        assert_equal(found, alone("audio", 1, 0.05))


LAYOUTS = {
    "one process": (1, {}),
    "parts": (2, H2),
    "other parts": (3, {**H3, **zero(1)}),
    "parts, dp, zero 3": (4, {**DP_H, **zero(3)}),
    "dp": (2, {"mesh": {"dp": 2}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", ["one process", "parts", "parts, dp, zero 3"])
def test_a_checkpoint_of_parts_loads_into_any_layout(before, after, tmp_path, alone):
    path = tmp_path / "step"
    run_warm(trained, *LAYOUTS[before], "audio", path)
    for found in run_warm(trained, *LAYOUTS[after], "audio", path):
        assert_equal(found, alone("audio", 1), losses=2)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_gathered_parameters_in_bfloat16_are_near_one_process(level, alone):
    name, config = "audio in groups", {**DP_H, **zero(level, dtype="bfloat16")}
    expected = alone(name, 1)[0].tolist()
    for losses, _ in run_warm(trained, 4, config, name):
        assert losses.tolist() == pytest.approx(expected, abs=0.05)
        assert losses.tolist() != pytest.approx(expected, abs=1e-7)  # it is in bfloat16


REFUSED = {
    "plan": {"mesh": {"h": 2, "tp": 2}, "plan": [{"match": "head", "style": "colwise"}]},
    "float8": {**H2, "float8": {"modules": ["head"]}},
    "copies": {**H2, "copies": 2},
    "offload": {**H2, "offload": {"activations": ["blocks.*"]}},
    "verify": {**H2, "verify": 1},
    "mode auto": {**H2, "mode": "auto"},
}


def refusal(config):
    with pytest.raises(UsageError) as error:
        trained(config, "audio")
    return error.value.message


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_know_parts_is_refused(name):
    ranks = torch.Size(REFUSED[name]["mesh"].values()).numel()
    for said in run_warm(refusal, ranks, REFUSED[name]):
        assert said.startswith("parallel")
        assert "\n" not in said
