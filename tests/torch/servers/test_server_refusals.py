"""What parameter servers do not do is one sentence before training."""

import re
import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn

import msrun
from msrun.errors import ConfigError, ModelError, MsrunError
from msrun.parallel.config_file import parse_config
from msrun.parallel.servers.parameters.remote_parameter import RemoteParameter
from msrun.parallel.servers.remote import RemoteParameters

pytestmark = pytest.mark.torch


class Tiny(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(8, 2, **options)
        self.out = nn.Linear(2, 1)

    def forward(self, ids):
        return self.out(self.table(ids))


def adamw(model):
    return torch.optim.AdamW(model.parameters())


def sharded(keys, build, optimizer, act):
    rt = msrun.init({"servers": {"params": ["table.weight"]}, **keys})
    model = rt.shard(build())
    update = optimizer(model)
    act(rt, model, update)


def attach(rt, _model, update):
    rt.optimizer(update)


def step_alone(_rt, model, update):
    model(torch.tensor([1])).sum().backward()
    update.step()


def frozen():
    model = Tiny()
    model.table.weight.requires_grad_(requires_grad=False)
    return model


def clip(rt, model, _update):
    rt.clip_grad_norm_(model, 1.0)


def clip_values(_rt, model, _update):
    model(torch.tensor([1])).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def look_at_values(_rt, model, _update):
    model(torch.tensor([1])).sum().backward()
    bool(torch.isnan(model.table.weight.grad).any())


def gradient_of(model):
    model(torch.tensor([1])).sum().backward()
    return model.table.weight.grad


def divide_by_it(_rt, model, _update):
    torch.tensor(2.0) / gradient_of(model)


def round_down(_rt, model, _update):
    gradient_of(model).div_(3, rounding_mode="floor")


def write_into_it(_rt, model, _update):
    torch.add(torch.ones(8, 2), torch.ones(8, 2), out=gradient_of(model))


def again(rt, _model, _update):
    rt.shard(Tiny())


def mixed(model):
    return torch.optim.SGD(model.out.parameters(), lr=0.1)


def half(model):
    return torch.optim.SGD([*model.table.parameters()], lr=0.1)


PLAN = {"plan": [{"match": "table", "style": "embedding"}], "mesh": {"dp": -1, "tp": 1}}
BOTH = {"servers": {"params": ["table.weight", "out.*"]}}
STALE = {"servers": {"params": ["table.weight"], "sync": {"staleness": 1}}}


def marked():
    msrun.init().set_param_ps(nn.Linear(2, 1))


def copied(_rt, model, _update):
    torch.optim.swa_utils.AveragedModel(model)


class Tied(Tiny):
    """Has the weight of its table in a layer, too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 8, bias=False)
        self.head.weight = self.table.weight


def relu():
    msrun.init().set_param_ps(nn.ReLU())


CASES = {
    "names no parameter of Tiny": ({"servers": {}}, Tiny, adamw, attach),
    "set_param_ps: parallel has no servers": ({"servers": None}, marked, adamw, attach),
    "set_param_ps: ReLU has no parameters": ({}, relu, adamw, attach),
    "'tables' matches nothing": ({"servers": {"params": ["tables"]}}, Tiny, adamw, attach),
    "table.weight is frozen": ({}, frozen, adamw, attach),
    "table.weight is also in parallel.plan": (PLAN, Tiny, adamw, attach),
    "head.weight and table.weight are one parameter, and the plan": (
        PLAN | {"plan": [{"match": "head", "style": "vocab"}]},
        Tied,
        adamw,
        attach,
    ),
    "table.weight is also in parallel.reduce.exclude": (
        {"reduce": {"exclude": ["table.*"]}},
        Tiny,
        adamw,
        attach,
    ),
    "has max_norm": ({}, lambda: Tiny(max_norm=1.0), adamw, attach),
    "do not offer the optimizer ASGD": (
        {},
        Tiny,
        lambda model: torch.optim.ASGD(model.parameters()),
        attach,
    ),
    "LBFGS computes the loss several times": (
        {},
        Tiny,
        lambda model: torch.optim.LBFGS(model.parameters()),
        attach,
    ),
    "AdamW does not train table.weight with sparse": (
        {},
        lambda: Tiny(sparse=True),
        adamw,
        attach,
    ),
    "cannot keep momentum_buffer": (
        {},
        lambda: Tiny(sparse=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        attach,
    ),
    "holds table.weight and not out": (BOTH, Tiny, half, attach),
    "cannot be copied or pickled": ({}, Tiny, adamw, copied),
    "servers do not have yet": ({}, Tiny, adamw, step_alone),
    "with a staleness servers step with each rank's gradient": (STALE, Tiny, adamw, clip),
    "clamp of the gradient of table.weight": ({}, Tiny, adamw, clip_values),
    "gradient of table.weight: a rank has its part": ({}, Tiny, adamw, look_at_values),
    "div of the gradient of table.weight: a rank has": ({}, Tiny, adamw, divide_by_it),
    "div of the gradient of table.weight: a rank": ({}, Tiny, adamw, round_down),
    "add of the gradient of table.weight": ({}, Tiny, adamw, write_into_it),
    "parameters of another model": ({}, Tiny, mixed, again),
}


def refusals():
    """Return what each case says, on one rank."""
    found = {}
    for name, words in CASES.items():
        try:
            sharded(*words)
        except MsrunError as error:
            found[name] = str(error)
        msrun.init().close()
    return found


def test_each_wrong_use_is_one_sentence(monkeypatch):
    monkeypatch.setenv("MSRUN_SERVER_NUM", "1")

    [found] = run_warm(refusals, 1)

    for name in CASES:
        assert name in found.get(name, "")


def test_a_row_that_fits_no_message_is_refused(monkeypatch):
    monkeypatch.setenv("MSRUN_SERVER_NUM", "1")
    large = nn.Parameter(torch.empty(1, 2**29, device="meta"))
    assert RemoteParameter("dense", nn.Parameter(large[:, 1:]), []).table.rows == 1

    with pytest.raises(ConfigError, match=r"dense of shape .* has no row that fits a message"):
        RemoteParameter("dense", large, [])


def test_a_batch_that_uses_more_rows_than_fit_a_message_is_refused(monkeypatch):
    monkeypatch.setenv("MSRUN_SERVER_NUM", "1")
    weight = nn.Parameter(torch.empty(8, 2**28, device="meta"))
    table = RemoteParameter("embed.weight", weight, [])

    with pytest.raises(ModelError, match=r"a batch uses 2 rows of embed\.weight") as raised:
        RemoteParameters.rows(None, table, torch.arange(2))

    assert raised.value.hint == "a message has at most 2147483647 bytes"


def no_servers():
    try:
        sharded({}, Tiny, adamw, attach)
    except ConfigError as error:
        return f"{error} {error.hint}"
    return ""


def test_a_job_without_servers_says_how_to_have_some(monkeypatch):
    monkeypatch.delenv("MSRUN_SERVER_NUM", raising=False)

    [sentence] = run_warm(no_servers, 1)

    assert re.search("this job has no servers.*--server-num", sentence)


def warned(config):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        msrun.init(config).shard(nn.Linear(2, 1))
    return [str(each.message) for each in caught if "parameter server" in str(each.message)]


def test_servers_that_no_parameter_lives_on_are_warned_of(monkeypatch):
    monkeypatch.setenv("MSRUN_SERVER_NUM", "2")

    [said] = run_warm(warned, 1, {})
    monkeypatch.delenv("MSRUN_SERVER_NUM")
    [nothing] = run_warm(warned, 1, {})

    [sentence] = said
    assert "this job has 2 parameter server(s), and no parameter lives there: name some" in sentence
    assert not nothing


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"sync": False}, "sync: false sets no bound"),
        ({"sync": {"staleness": -1}}, "servers.sync.staleness: -1.0 must be at least 0"),
        ({"snapshot": {"every": 0}}, "servers.snapshot.every: 0 must be at least 1"),
        ({"copies": 1}, "parallel.servers.copies: is no key"),
    ],
)
def test_wrong_keys(keys, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_config({"servers": {"params": ["a"], **keys}})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"mode": "auto"}, "mode auto plans whole models"),
        ({"mode": "manual"}, "mode manual leaves the reduction to the script"),
        ({"verify": 1}, "verify compares with one process, which has no servers"),
        (
            {"pipeline": {"stages": {"a": 0}, "microbatches": 2}},
            "every rank gives them the same parameters, and each stage of a pipeline has its own",
        ),
        (
            {"precision": "fp16"},
            "precision: fp16 would send them gradients of a scaled loss (choose bf16)",
        ),
    ],
)
def test_what_is_not_composed(keys, sentence):
    with pytest.raises(ConfigError, match=re.escape(f"parallel.servers: {sentence}")):
        parse_config({"servers": {"params": ["a"]}, **keys})
