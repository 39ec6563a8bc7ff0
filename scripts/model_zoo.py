"""Models that people train, in small: what scripts/model_table.py puts through every configuration.

All have random weights; nothing is downloaded.
"""

from __future__ import annotations

from zoo_entry import SAMPLES, ZooModel  # type: ignore[import-not-found]  # beside this file
from zoo_others import OTHER_MODELS  # type: ignore[import-not-found]
from zoo_text import TEXT_MODELS  # type: ignore[import-not-found]

__all__ = ["SAMPLES", "ZOO", "ZooModel"]

ZOO: dict[str, ZooModel] = {**TEXT_MODELS, **OTHER_MODELS}
