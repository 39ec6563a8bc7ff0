"""`float8`: products of torchao in every layout are those of torchao by hand."""

import pytest
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm

import msrun
from msrun.errors import UsageError

torchao = pytest.importorskip("torchao.float8")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.own_process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

FLOAT8 = {"float8": {"modules": ["layers.*"]}}
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
# Of each: the parts of a batch whose scales are apart.
LAYOUTS = {
    "dp": (2, {}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "zero 1, accumulate": (4, {"optimizer": {"zero": 1}, "accumulate": 2}),
    "recompute": (2, {"recompute": {"modules": ["layers.*"]}}),
    "offload": (2, {"offload": {"activations": ["layers.*"], "threshold": 0}}),
    "pp": (
        2,
        {"mesh": {"dp": 1, "pp": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}},
    ),
    "compile": (2, {"compile": {"modules": ["layers.*"]}}),
    "tp beside": (
        1,
        {
            "mesh": {"tp": 2},
            "plan": [{"match": "embed", "style": "embedding"}, {"match": "head", "style": "vocab"}],
        },
    ),
}
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def curves(layouts, recipe="tensorwise"):
    found = {}
    for name in layouts:
        rt = msrun.init(LAYOUTS[name][1] | {"float8": FLOAT8["float8"] | {"recipe": recipe}})
        model = rt.shard(build("transformer"))
        update = rt.optimizer(OPTIMIZERS["sgd"](model.parameters()))
        share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
        losses = []
        for batch in batches("transformer"):
            part = [t.chunk(count)[share] for t in batch]
            losses.append(rt.step(model, update, MODELS["transformer"][1], *part).item())
        found[name] = losses
        rt.close()
    return found


def by_hand(parts, recipe="tensorwise"):
    """Return losses of one process that computes a batch in parts, by torchao alone."""
    from dataclasses import replace

    options = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = build("transformer")
    torchao.convert_to_float8_training(
        model, config=options, module_filter_fn=lambda _, name: name.startswith("layers.")
    )
    update = OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for x, y in batches("transformer"):
        update.zero_grad()
        total = 0.0
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = MODELS["transformer"][1](model(part[0]), part[1]) / parts
            loss.backward()
            total += loss.item()
        update.step()
        losses.append(total)
    return losses


@pytest.mark.timeout(600)
def test_every_layout_is_torchao_by_hand():
    expected = {parts: by_hand(parts) for parts in (1, 2, 4)}
    assert expected[1] != expected[2]  # of other scales
    for found in run_warm(curves, 2, list(LAYOUTS), timeout=500):
        for name, losses in found.items():
            # A value that is rounded to the other side of a boundary of float8 is 1/16 off.
            assert losses == pytest.approx(expected[LAYOUTS[name][0]], abs=2e-3), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_those_of_torchao(recipe):
    for found in run_warm(curves, 2, ["dp"], recipe):
        assert found["dp"] == pytest.approx(by_hand(2, recipe), abs=2e-3)


def test_a_layer_keeps_its_name_parameters_and_hooks():
    with msrun.init(FLOAT8) as rt:
        model, seen = build("transformer"), []
        layer = model.layers[0].up
        layer.register_forward_hook(lambda *_: seen.append("hook"))
        weight, names = layer.weight, dict(model.named_parameters()).keys()
        model = rt.shard(model)
        model(batches("transformer")[0][0])

    assert model.layers[0].up is layer
    assert layer.weight is weight
    assert dict(model.named_parameters()).keys() == names
    assert type(layer).__name__ == "Float8Linear"
    assert type(model.head).__name__ == "Linear"
    assert seen == ["hook"]


@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        (
            {"float8": {"modules": ["fc3"]}},
            "mlp",
            (
                "parallel.float8.modules: fc3 is Linear(32, 10), and products in float8 take "
                "multiples of 16"
            ),
        ),
        (
            {"float8": {"modules": ["norm"]}},
            "transformer",
            "parallel.float8.modules: no nn.Linear is in what the patterns match",
        ),
        (
            {
                **FLOAT8,
                "mesh": {"dp": 1, "tp": 1},
                "plan": [{"match": "layers.*.up", "style": "colwise"}],
            },
            "transformer",
            (
                "parallel.float8.modules: layers.0.up has a rule of parallel.plan, which divides "
                "its product"
            ),
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(config, kind, said):
    with msrun.init(config) as rt, pytest.raises(UsageError) as refused:
        rt.shard(build(kind))
    assert refused.value.message == said
