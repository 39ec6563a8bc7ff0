"""The loop of accelerate on its page trains as the one beside it."""

import re
from pathlib import Path

import pytest
import torch
from ranks import run_warm

pytestmark = [pytest.mark.torch, pytest.mark.slow]

DOCS = Path(__file__).parents[3] / "docs"
PRELUDE = """
torch.manual_seed(1)
made = Net()
"""
THEIRS = """
from torch.utils.data import DataLoader
model, optimizer = made, torch.optim.AdamW(made.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
"""


def snippet(page, language, word):
    """Return the first snippet of a page that has the word."""
    text = (DOCS / page).read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return next(code for code in found if word in code)


def trained(code):
    """Return the weights after a snippet, which reads the data in their order."""
    assert code.count("shuffle=True") == 1
    names = {"__name__": "__main__"}
    prelude = snippet("parallel.md", "python prelude", "class Net") + PRELUDE
    torch.manual_seed(7)
    exec(prelude + code.replace("shuffle=True", "shuffle=False"), names)
    return {name: value.detach().clone() for name, value in names["model"].state_dict().items()}


def ours(folder):
    import os

    os.chdir(folder)
    Path("p.yaml").write_text(snippet("how-to/from_accelerate.md", "yaml", "accumulate"))
    os.environ["MSRUN_CONFIG"] = "p.yaml"
    code = snippet("how-to/from_accelerate.md", "python", "scheduler")
    return trained(code.replace("rt.shard(Net())", "rt.shard(made)"))


def theirs(folder):
    import os

    os.chdir(folder)
    return trained(THEIRS + snippet("how-to/from_accelerate.md", "py", "Accelerator"))


def test_the_loops_of_the_page_of_accelerate_are_one(tmp_path):
    pytest.importorskip("accelerate")
    found, expected = run_warm(ours, 1, tmp_path)[0], run_warm(theirs, 1, tmp_path)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name
