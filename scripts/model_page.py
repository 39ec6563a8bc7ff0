"""Write the table of models as a page, from what its cells came to."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

_HEAD = """# Real models in every configuration

Each cell trains a small model with random weights for three steps, on ranks of gloo and in float64,
and compares losses, weights and buffers with plain torch in one process on the same global batches.
*equal* is a difference below 1e-8 of the loss (1e-6 where the model itself computes logits or loss
in float32) and 1e-6 of each weight. A refusal is one sentence before any weight changes; the
numbers lead to the sentences below the table, each with its hint. `-` is a configuration that is
not for the model.

`scripts/model_table.py` makes this page, from the models of `scripts/zoo_text.py`, `zoo_others.py`,
`zoo_families.py` and `zoo_strangers.py`. `python scripts/model_table.py run --again` trains all
cells anew, or with `--only 'Llama:tp'` one of them, and `... page` writes the page. The nightly
workflow runs every row again and compares (`.ci/run slow`), and each change a sample of the cells.

"""
_NOTES = """
- `dp`, `zero 1` to `zero 3`, `recompute` (of every block) and `accumulate` (of 2) have two
  data-parallel ranks. `pp` has `stages: auto` and two micro-batches. `auto` is `mode: auto` with
  `mesh: auto`. The last two columns have four ranks, 2 x 2, and six of the models.
- `tp` has the plans that ship: `plan: llama` and other names of families, and `plan: auto_tp` for
  models of no family. Only LSTM and DLRM have rules that were written for them.
- Optimizers are AdamW, and SGD where gradients are sparse. Losses are computed from the outputs,
  and targets of texts hold padding of -100. Decoders have `use_cache=False`. The rows with
  `labels` or prefixes, SpeechT5, LLaVA and PatchTST return the loss that transformers computes.
  Those with `labels` or prefixes have their default cache, and a mask where they read texts.
- Cells were run on 28 November 2026 with torch 2.13, transformers 5.24, timm 1.0, diffusers 0.42
  and peft 0.21, all again, and came to what they had come to five days before. On 23 and 24
  November `scripts/verify_models.py` trained 889 cells under `verify: first_step` (861 equal one
  process, 28 are refused as in the table), and it takes others each night.
  `tests/torch/models/test_other_families.py` has families that are not in the table.
"""


def render_page(
    models: Sequence[str], columns: Sequence[str], cells: Mapping[str, Mapping[str, str]]
) -> str:
    """Return the page with `cells`: model -> column -> what it came to."""
    notes: dict[str, int] = {}
    lines = [
        f"| model | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for model in models:
        row = []
        for column in columns:
            answer = cells.get(model, {}).get(column, "not run")
            kind, colon, _ = answer.partition(": ")
            number = f" [{notes.setdefault(answer, len(notes) + 1)}]" if colon else ""
            row.append(f"{kind}{number}")
        lines.append(f"| {model} | {' | '.join(row)} |")
    kinds = Counter(
        cells.get(model, {}).get(column, "not run").partition(": ")[0]
        for model in models
        for column in columns
    )
    total = sum(count for kind, count in kinds.items() if kind not in ("-", "not run"))
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    share = f"{kinds['equal'] / total:.0%}" if total else "none"
    said = "".join(
        f"{textwrap.fill(f'{number}. {answer}', 100, subsequent_indent='   ')}\n"
        for answer, number in notes.items()
    )
    body = "\n".join(lines)
    summary = f"{counts}: {share} of the cells that were run are equal."
    return f"{_HEAD}{body}\n\n{summary}\n{_NOTES}\n{said}"
