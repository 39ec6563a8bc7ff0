"""The table of real models: its page is current, and a sample of its cells holds."""

import importlib.util

import model_table
import pytest
from model_zoo import ZOO

pytestmark = pytest.mark.torch

CELLS = model_table.read_cells()
SAMPLE = [
    *(("LSTM", "dp"), ("LSTM", "pp"), ("DLRM", "zero 3"), ("DLRM", "auto")),
    *(("GPT by hand", "tp"), ("graph network", "recompute")),
    *(("Llama", "pp"), ("T5", "zero 3"), ("BERT", "tp")),  # of transformers
]


def test_the_page_is_current():
    text = model_table.PAGE.read_text(encoding="utf-8")
    assert text == model_table.page(CELLS), "run python scripts/model_table.py page"


def test_no_cell_is_wrong():
    kinds = {
        f"{model}, {column}": answer.partition(":")[0]
        for model, row in CELLS.items()
        for column, answer in row.items()
    }
    assert {kind for kind in kinds.values() if kind not in ("equal", "refused", "-")} == set()
    shown = [kind for kind in kinds.values() if kind != "-"]
    assert shown.count("equal") >= 0.9 * len(shown)


@pytest.mark.parametrize(("model", "column"), SAMPLE)
@pytest.mark.few(3)
def test_a_cell(model, column):
    assert model_table.run_cell(ZOO[model], column, model_table.LIMIT) == CELLS[model][column]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ZOO)
def test_a_row(model):
    needs = ZOO[model].needs
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    found = {
        column: model_table.run_cell(ZOO[model], column, model_table.LIMIT)
        for column in model_table.COLUMNS
    }
    kinds = {column: answer.partition(":")[0] for column, answer in found.items()}
    assert kinds == {column: said.partition(":")[0] for column, said in CELLS[model].items()}
