"""Models that people train, in small: what scripts/model_table.py puts through every configuration.

All have random weights; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses

from zoo_entry import SAMPLES, ZooModel  # type: ignore[import-not-found]  # beside this file
from zoo_families import FAMILIES  # type: ignore[import-not-found]
from zoo_others import OTHER_MODELS  # type: ignore[import-not-found]
from zoo_strangers import STRANGERS  # type: ignore[import-not-found]
from zoo_text import TEXT_MODELS  # type: ignore[import-not-found]

__all__ = ["SAMPLES", "ZOO", "ZooModel"]

_COMBINED = ("GPT-2", "Llama", "DistilBERT", "ALBERT", "BART", "CLIP")
ZOO: dict[str, ZooModel] = {
    name: dataclasses.replace(entry, is_combined=name in _COMBINED)
    for name, entry in {**TEXT_MODELS, **OTHER_MODELS, **FAMILIES, **STRANGERS}.items()
}
