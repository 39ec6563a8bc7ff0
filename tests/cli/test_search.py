"""`msrun search`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from msrun.cli.main import main
from msrun.cli.render.plan_chart import picture
from msrun.parallel.search.plan.plan import Operator, read_plan, styles

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(layers)])

    def forward(self, x, y):
        for layer in self.layers:
            x = functional.relu(layer(x))
        return functional.mse_loss(x, y)


def make():
    return Net(), (torch.randn(64, 1024), torch.randn(64, 1024))


def deep():
    return Net(5), (torch.randn(64, 1024), torch.randn(64, 1024))


def one():
    return Net(1), (torch.randn(64, 1024), torch.randn(64, 1024))


def named():
    y, x = torch.randn(64, 1024), torch.randn(64, 1024)
    return Net(), {"y": y, "x": x}


def alone():
    return Net()


def broken():
    raise RuntimeError("no weights here")
"""

TEXT = """\
plan:
  model      tinynet.py:make
  ranks      4 (cpu)
  mesh       dp 4
  batch      64 in 1 micro-batches
  recompute  no
  runs on    executor
  step       0.01426 s predicted
  memory     0.0206 GiB a rank
  gap        0.00% at most to the best plan on this mesh

where the time goes:
  computation                                       0.008521 s   59.8%
  update of parameters                              0.003355 s   23.5%
  all-reduce over dp, activations                   0.0007932 s  5.6%
  reduce-scatter over dp, activations               0.0003966 s  2.8%
  all-gather over dp, gradients of activations      0.0003966 s  2.8%
  all-gather over dp, activations                   0.0003966 s  2.8%
  reduce-scatter over dp, gradients of activations  0.0003966 s  2.8%

parameters:
  name               dp
  layers.0,2.weight  S(0)
  layers.1,3.weight  S(1)

rejected:
  ep: not for this model, no module has the weights of all experts in dim 0 of its parameters
  cp: not for this model, no sequences of 1024 tokens or more
  grid 2d on dp 1 x x 2 x y 2: 0.01543 s, the plan takes less
  26 layouts cannot be faster
  0 layouts do not fit into 16 GiB
"""

EXPLAINED = """\
layers.1* over tp:
  name               divided  style    inputs      outputs
  layers.1.weight                                  S(1)
  linear_1 (linear)  k        rowwise  S(1); S(1)  P
"""

NO_BLOCKS = """\
tinynet.py:one: the model has no three equal blocks in a row, which a search for a \
mesh needs
  hint: name a mesh without stages, such as --mesh dp=4,tp=2"""
NO_MODE = """\
--mode best is not known (choose exact, dynamic_programming, recursive, recursive_programming, \
propagation, sharding_propagation)"""

CPU = ("--world", "4", "--topology", "cpu")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinynet.py").write_text(MODEL)
    return tmp_path


def search(capsys, *words):
    code = main(["search", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_plan_in_words(capsys):
    code, out, err = search(capsys, "tinynet.py:make", *CPU)
    assert (code, out) == (0, TEXT)
    assert err.endswith(" s: 0.01426 s a step, 1 stages of 4, 1 micro-batches\n")


def test_inputs_by_name_give_the_same_plan(capsys):
    mesh = (*CPU, "--mesh", "dp=4")
    _, out, _ = search(capsys, "tinynet.py:make", *mesh)
    assert search(capsys, "tinynet.py:named", *mesh)[1] == out.replace(":make", ":named")


def test_a_budget_ends_the_search_with_the_best_so_far(capsys):
    code, out, err = search(capsys, "tinynet.py:make", *CPU, "--budget", "0s")
    assert code == 0
    assert err.endswith("the budget of 0 s is spent: this is the best so far\n")
    assert out.startswith("plan:\n  model      tinynet.py:make\n")
    assert out.endswith(" layouts were not looked at\n")


def test_what_one_module_does(capsys):
    words = ("tinynet.py:make", *CPU, "--mesh", "tp=4", "--explain", "layers.1*")
    assert search(capsys, *words) == (0, EXPLAINED, "")


def test_stages_of_a_named_mesh(capsys):
    words = ("tinynet.py:deep", *CPU, "--json", "--mesh")
    plan = json.loads(search(capsys, *words, "pp=2,tp=2")[1])
    assert (plan["stages"], plan["mesh"]) == (2, {"tp": 2})
    assert plan["microbatches"] > 1
    assert sum(plan["costs"].values()) == pytest.approx(plan["seconds"], rel=1e-9)
    data = json.loads(search(capsys, *words, "pp=2,dp=2")[1])
    assert (data["stages"], data["mesh"]) == (2, {"dp": 2})
    assert 64 // data["microbatches"] % 2 == 0
    whole = json.loads(search(capsys, *words, "pp=1,tp=4")[1])
    assert (whole["stages"], whole["mesh"]) == (1, {"tp": 4})


def test_styles_have_the_names_of_rules(capsys, here):
    words = ("tinynet.py:make", *CPU, "--json", "--mesh", "dp=2,tp=2", "-o", "plan.json")
    assert search(capsys, *words)[0] == 0
    plan = read_plan(here / "plan.json")

    def known(op, divided, *weight):
        operator = Operator(module="up", op=op, divided=divided, ins=[], outs=[])
        return styles(msgspec.structs.replace(plan, params={"up.weight": list(weight)}), operator)

    assert known("linear", ["b0", "n"], "R, state cut", "S(0)") == ["zero 1", "colwise"]
    assert known("linear", ["b0", "k"], "R", "S(1)") == ["data", "rowwise"]
    assert known("linear", ["b0", "k"], "S(0)", "S(0)") == ["zero 3", "other"]
    assert known("embedding", ["v", "h"], "S(0)", "S(1)") == ["embedding", "colwise"]
    assert known("layer_norm", ["R", "d1"], "R", "R") == ["whole", "sequence"]
    assert known("gelu", ["d0", "d1"], "R", "R") == []


def test_plans_are_written_and_compared(capsys, here):
    base = ("tinynet.py:make", *CPU, "--json", "--mesh")
    code, out, _ = search(capsys, *base, "tp=4", "-o", "a.json")
    assert code == 0
    plan = json.loads(out)
    assert plan == json.loads((here / "a.json").read_text())
    assert (plan["mesh"], plan["gap"]) == ({"tp": 4}, 0.0)
    assert sum(plan["costs"].values()) == pytest.approx(plan["seconds"], rel=1e-9)
    search(capsys, *base, "dp=2,tp=2", "--mode", "recursive_programming", "-o", "b.json")
    assert search(capsys, "diff", "a.json", "a.json") == (0, "", "the plans are equal\n")
    code, out, _ = search(capsys, "diff", "a.json", "b.json")
    lines = out.splitlines()
    assert lines[1].split() == ["a.json", "b.json"]
    assert "  mesh             tp 4         dp 2 x tp 2" in lines
    assert "  layers.0.weight  S(0)         S(0) x S(0)" in lines


def test_ranks_in_another_order_are_priced_and_shown(capsys, here):
    (here / "t.yaml").write_text("{preset: cpu, per_node: 2, across: {bandwidth: 1e7, latency: 0}}")
    words = ("tinynet.py:make", "--world", "4", "--topology", "t.yaml", "--mesh", "dp=2,tp=2")
    plain = json.loads(search(capsys, *words, "--json")[1])
    turns = ("--rank-list", "0,2,1,3")
    plan = json.loads(search(capsys, *words, *turns, "--json", "-o", "plan.json")[1])
    assert (plain["rank_list"], plan["rank_list"]) == ([], [0, 2, 1, 3])
    assert plan["seconds"] != pytest.approx(plain["seconds"], rel=1e-3)
    assert "  ranks in order  0,2,1,3\n" in search(capsys, *words, *turns)[1]
    same = json.loads(search(capsys, *words, "--rank-list", "0,1,2,3", "--json")[1])
    assert same == plain


@pytest.mark.parametrize("mode", ["exact", "propagation"])
def test_rules_of_a_file_are_kept(capsys, here, mode):
    (here / "rules.yaml").write_text(
        "- {match: layers.1, style: rowwise}\n- {match: layers.2, out: [null, null]}\n"
    )
    base = ("tinynet.py:make", *CPU, "--json", "--mesh", "dp=2,tp=2")
    best = json.loads(search(capsys, *base)[1])
    found = json.loads(search(capsys, *base, "--mode", mode, "--rules", "rules.yaml")[1])
    assert found["params"]["layers.1.weight"][1] == "S(1)"
    assert best["seconds"] <= found["seconds"] * (1 + 1e-12)
    assert found["shared"]["linear_2"][1] == "R" != best["shared"]["linear_2"][1]


def test_a_plan_is_drawn(capsys, here):
    words = ("tinynet.py:make", *CPU, "--mesh", "tp=4", "--plot", "plan.svg", "-o", "plan.json")
    assert search(capsys, *words)[0] == 0
    drawn = (here / "plan.svg").read_text()
    assert drawn == picture(read_plan(here / "plan.json"))
    assert " GiB of 16 GiB that it has<" in drawn
    assert "layers.*: linear" in drawn


def test_operators_of_a_micro_batch_of_one_are_named_right(capsys):
    words = ("tinynet.py:make", *CPU, "--batch", "1", "--json")
    operators = json.loads(search(capsys, *words)[1])["operators"]
    divided = [one["divided"] for one in operators.values() if one["op"] == "linear"]
    assert divided == [["n"], ["k"], ["n"], ["k"]]


def test_a_file_describes_the_cluster(capsys, here):
    (here / "t.yaml").write_text("{preset: cpu, name: ours, flops: 1.0e+10}")
    words = ("tinynet.py:make", "--world", "4", "--topology", "t.yaml", "--mesh", "tp=4", "--json")
    plan = json.loads(search(capsys, *words)[1])
    assert plan["topology"] == "ours"
    assert plan["costs"]["computation"] > 0.04


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("tinynet.py:make",), "missing option '--world'"),
        (("tinynet.py:make", "--world", "four"), "--world 'four' is no number from 1 to 1048576"),
        (("tinynet.py", *CPU), "'tinynet.py' names no function (choose such as model.py:make)"),
        (("no.py:make", *CPU), "no.py is no file"),
        (("tinynet.py:no", *CPU), "tinynet.py has no function no"),
        (("tinynet.py:broken", *CPU), "tinynet.py:broken failed: RuntimeError: no weights here"),
        (
            ("tinynet.py:alone", *CPU),
            "tinynet.py:alone must return a model and a sample of its inputs",
        ),
        (
            ("tinynet.py:one", *CPU),
            NO_BLOCKS,
        ),
        (
            ("tinynet.py:make", *CPU, "--memory", "1MiB"),
            "--memory 0.000977GiB: no plan on 4 ranks fits; the smallest plan takes 0.0195 GiB",
        ),
        (("tinynet.py:make", *CPU, "--mesh", "dp=2"), "--mesh: dp 2 is not --world 4"),
        (
            ("tinynet.py:make", *CPU, "--mesh", "dp"),
            "--mesh 'dp' is no mesh (choose such as dp=4,tp=2)",
        ),
        (
            ("tinynet.py:make", *CPU, "--mesh", "dp=2,pp=2"),
            "--mesh: pp comes first, followed by one to 3 other axes",
        ),
        (
            ("tinynet.py:make", *CPU, "--mesh", "pp=2,dp=2"),
            "--mesh pp=2 does not divide the 3 equal blocks of the model",
        ),
        (
            ("tinynet.py:make", *CPU, "--mesh", "pp=2,dp=2", "--mode", "recursive"),
            "--mode recursive: stages are found by mode exact alone",
        ),
        (
            ("tinynet.py:deep", *CPU, "--mesh", "pp=2,dp=2", "--batch", "3"),
            "--batch 3 has no 2 or more equal micro-batches that axis dp divides",
        ),
        (
            ("tinynet.py:make", *CPU, "--mesh", "dp=4", "--batch", "6"),
            "--batch 6 does not divide over dp 4",
        ),
        (
            ("tinynet.py:make", *CPU, "--rank-list", "0,1,2"),
            "--rank-list 0,1,2 has not each of the 4 ranks once",
        ),
        (
            ("tinynet.py:make", *CPU, "--rank-list", "0,1,2,4"),
            "--rank-list '0,1,2,4': '4' is no rank below 4",
        ),
        (("tinynet.py:make", *CPU, "--mode", "recursive"), "--mode recursive needs --mesh"),
        (
            ("tinynet.py:make", *CPU, "--mesh", "dp=4", "--mode", "propagation"),
            "--mode propagation needs --rules, from which layouts spread",
        ),
        (
            ("tinynet.py:make", *CPU, "--rules", "rules.yaml"),
            "--rules needs --mesh, whose axes the rules name",
        ),
        (
            ("tinynet.py:make", *CPU, "--mesh", "dp=4", "--rules", "none.yaml"),
            "none.yaml cannot be read: No such file or directory",
        ),
        (
            ("tinynet.py:make", *CPU, "--mode", "best"),
            NO_MODE,
        ),
        (
            ("tinynet.py:make", "--world", "4", "--topology", "b200"),
            "topology: 'b200' is no preset (choose a100, h100, h200, ascend910, cpu)",
        ),
        (
            ("tinynet.py:make", *CPU, "--mesh", "tp=4", "--explain", "no"),
            "--explain 'no': nothing has this name (choose layers.0, layers.1, layers.2, layers.3)",
        ),
        (
            ("tinynet.py:make", *CPU, "--plot", "a.png"),
            "--plot a.png: a picture is SVG (choose such as a.svg)",
        ),
        (
            ("tinynet.py:make", *CPU, "--plot", "no/a.svg"),
            "--plot no/a.svg cannot be written: No such file or directory",
        ),
        (
            ("tinynet.py:make", *CPU, "--plot", "tinynet.py/a.svg"),
            "--plot tinynet.py/a.svg cannot be written: Not a directory",
        ),
        (
            ("tinynet.py:make", *CPU, "--plot", "/proc/version.svg"),
            "--plot /proc/version.svg cannot be written: No such file or directory",
        ),
        (("tinynet.py:make", *CPU, "-o", "."), "-o . cannot be written: Is a directory"),
        (("diff", "a.json", "b.json"), "a.json cannot be read: No such file or directory"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    assert search(capsys, *words) == (2, "", f"error: {sentence}\n")


def test_a_refused_search_leaves_no_file(capsys, here):
    search(capsys, "tinynet.py:broken", *CPU, "--plot", "a.svg", "-o", "a.json")
    assert not list(here.glob("a.*"))


ENDING = """
import atexit
import os
import sys


class Kept:
    def __del__(self, write=os.write):
        write(1, b"taken apart")


sys.kept = Kept()
atexit.register(print, "the file's own end")
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "code", "end"), [("make", 0, "}\nthe file's own end\n"), ("broken", 2, "own end\n")]
)
def test_a_process_ends_with_its_code_and_its_output_and_takes_nothing_apart(here, name, code, end):
    (here / "tinynet.py").write_text(MODEL + ENDING)
    words = ("search", f"tinynet.py:{name}", *CPU, "--mesh", "tp=4", "--json")

    done = subprocess.run(
        [sys.executable, "-m", "msrun", *words], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout.endswith(end)) == (code, True)
    assert "taken apart" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_model_that_leaves_has_the_last_word(here):
    (here / "tinynet.py").write_text(MODEL + "\n\ndef leave():\n    raise SystemExit(7)\n")
    words = ("search", "tinynet.py:leave", *CPU)

    done = subprocess.run([sys.executable, "-m", "msrun", *words], check=False)

    assert done.returncode == 7
