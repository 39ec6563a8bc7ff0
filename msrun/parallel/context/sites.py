"""Places in a model that call functions, and the refusal of what a compiled module calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from msrun.errors import ModelError
from msrun.parallel.config import ROOT

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def apart_refusal(name: str, what: str) -> ModelError:
    """Return the error for a compiled module with something that is of the tokens of all ranks."""
    return ModelError(
        f"{ROOT}.compile.modules: {name} has {what}, which is that of the tokens of all ranks, and "
        "the compiler does not follow it",
        hint="name modules that compute on each token by itself, such as '*.mlp'",
    )


def site_of_call() -> tuple[Any, int]:
    """Return the place in the model that called the running function."""
    frame = sys._getframe(1)  # noqa: SLF001 - a whole traceback for each call would cost more
    while frame.f_back and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def shown_site(site: tuple[Any, int]) -> str:
    """Return a place in words."""
    code, _ = site
    return f" ({Path(code.co_filename).name}, {code.co_name})"
