"""State dicts of models and optimizers after `rt.shard`: right, or refused with what to call."""

import copy
import io

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm

import msrun
from msrun.errors import ModelError, RanksDisagreeError
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

NAME, LOSS = "transformer", MODELS["transformer"][1]
TP = [
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
LAYOUTS = {
    "dp": (2, {}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "zero 2": (2, {"optimizer": {"zero": 2}}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "zero 3 on 3": (3, {"optimizer": {"zero": 3}}),
    "tp": (2, {"mesh": {"tp": 2}, "plan": TP}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}}),
    "zero 3, pp": (
        4,
        {
            "mesh": {"dp": 2, "pp": 2},
            "pipeline": {"stages": STAGES, "microbatches": 2},
            "optimizer": {"zero": 3},
        },
    ),
    "auto": (2, {"mesh": {"dp": 1, "tp": 2}, "mode": "auto", "plan": TP[:1]}),
}
DIVIDED = [name for name in LAYOUTS if name != "dp"]


def started(layout):
    """Return the runtime and a model of other weights than `trained`."""
    rt = msrun.init(LAYOUTS[layout][1])
    network = build(NAME)
    with torch.no_grad():
        for param in network.parameters():
            param.mul_(0.5)
    size = 12 // rt.layout.size("dp") if rt.config.mesh else 12
    return rt, rt.shard(network, sample=[batches(NAME, size)[0][0]])


def local(rt, batch):
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    return [part.chunk(count)[share] for part in batch]


def trained(steps=2):
    """Return a model of one process and its optimizer, after some steps."""
    network = build(NAME)
    update = OPTIMIZERS["adamw"](network.parameters())
    return network, update, train(network, update, slice(steps))


def train(network, update, steps):
    losses = []
    for x, y in batches(NAME, 12)[steps]:
        update.zero_grad()
        loss = LOSS(network(x), y)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def goes_on(rt, model, update):
    return [
        rt.step(model, update, LOSS, *local(rt, batch)).item() for batch in batches(NAME, 12)[2:4]
    ]


def _loads_whole(layout):
    rt, model = started(layout)
    network, plain, _ = trained()
    assert "All keys matched" in str(model.load_state_dict(network.state_dict()))
    expected = network.state_dict()
    whole = rt.state_dict(model)
    assert list(whole) == (list(expected) if rt.rank == 0 else [])
    for name, value in whole.items():
        assert torch.equal(value, expected[name]), name
    update = rt.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    if "pp" not in layout:
        update.load_state_dict(copy.deepcopy(plain.state_dict()))
        expected_losses = train(network, plain, slice(2, 4))
    else:
        with pytest.raises(ModelError, match="groups of"):
            update.load_state_dict(plain.state_dict())
        plain = OPTIMIZERS["adamw"](network.parameters())
        expected_losses = train(network, plain, slice(2, 4))
    assert goes_on(rt, model, update) == pytest.approx(expected_losses, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.few(3)
def test_the_state_dicts_of_one_process_are_loaded(layout):
    run_warm(_loads_whole, LAYOUTS[layout][0], layout)


def _loads_own(layout):
    rt, model = started(layout)
    update = rt.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    goes_on(rt, model, update)
    kept = copy.deepcopy(model.state_dict())
    assert set(kept) <= set(build(NAME).state_dict())
    state = copy.deepcopy(update.state_dict())
    before = rt.state_dict(model)
    first = goes_on(rt, model, update)
    model.load_state_dict(kept)
    update.load_state_dict(state)
    again = rt.state_dict(model)
    assert all(torch.equal(again[name], value) for name, value in before.items())
    assert goes_on(rt, model, update) == first


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.few(3)
def test_a_state_dict_can_be_kept_and_loaded_again(layout):
    run_warm(_loads_own, LAYOUTS[layout][0], layout)


def _refuses_files(layout):
    rt, model = started(layout)
    update = rt.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    goes_on(rt, model, update)
    for content, said in (
        (model.state_dict(), "Transformer.state_dict() has the parts of this rank alone"),
        ({"model": model.state_dict()}, "Transformer.state_dict() has the parts of this rank"),
        (update.state_dict(), "AdamW.state_dict() has the parts of this rank alone"),
    ):
        with pytest.raises(ModelError) as caught:
            torch.save(content, io.BytesIO())
        assert caught.value.message.startswith(said)
        assert "rt.save" in caught.value.hint


@pytest.mark.parametrize("layout", DIVIDED)
@pytest.mark.few(3)
def test_no_file_of_parts_is_written_as_if_it_were_whole(layout):
    run_warm(_refuses_files, LAYOUTS[layout][0], layout)


def _names(layout):
    _, model = started(layout)
    state = build(NAME).state_dict()
    del state["layers.0.up.weight"], state["norm.bias"]
    state["other"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    found = model.load_state_dict(state, strict=False)
    return str(caught.value), sorted(found.missing_keys), found.unexpected_keys


@pytest.mark.parametrize("layout", ["zero 3", "tp", "pp"])
def test_names_are_compared_with_the_whole_model(layout):
    for said, missing, unexpected in run_warm(_names, LAYOUTS[layout][0], layout):
        assert 'Unexpected key(s) in state_dict: "other"' in said
        assert missing == ["layers.0.up.weight", "norm.bias"]
        assert unexpected == ["other"]


def _averages(layout):
    _, model = started(layout)
    average = torch.optim.swa_utils.AveragedModel(model)
    network, _, _ = trained()
    average.load_state_dict(torch.optim.swa_utils.AveragedModel(network).state_dict())
    for name, param in average.module.named_parameters():
        assert torch.equal(full_tensor(param), network.get_parameter(name)), name
    if layout != "dp":
        with pytest.raises(ModelError):
            torch.save(average.state_dict(), io.BytesIO())


@pytest.mark.parametrize("layout", ["dp", "tp"])
def test_an_average_of_the_model_loads_whole_tensors(layout):
    run_warm(_averages, LAYOUTS[layout][0], layout)


def _given_to_one(layout):
    rt, model = started(layout)
    update = rt.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    if rt.rank == 0:
        model.load_state_dict(trained()[0].state_dict())
    with pytest.raises(RanksDisagreeError) as caught:
        goes_on(rt, model, update)
    return caught.value.message


@pytest.mark.parametrize("layout", ["zero 1", "zero 3", "tp"])
def test_a_state_dict_that_one_rank_alone_was_given_is_noticed(layout):
    for said in run_warm(_given_to_one, LAYOUTS[layout][0], layout):
        assert said.startswith("ranks have other values of ")
        assert layout == "tp" or "the state dict that load_state_dict was given (rank" in said
