"""`generate()` of transformers on a model in stages.

The loop of the library runs on all ranks of the pipeline alike.  The model that it calls runs all
stages, and returns the same logits on all ranks; so do their random generators the same numbers.
Stages keep no keys and values of earlier tokens: each token computes those before it again, which
is right for samples between steps, and slow for more.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.exchange.generators import set_torch_states, torch_states
from msrun.parallel.exchange.messages import SentTensor, broadcast
from msrun.parallel.pipeline.ranks import PipelineRanks

_LOOP = "transformers.generation.utils"  # where `generate` is, of models that have no other one
_CACHES = ("past_key_values", "cache_implementation", "cache_config", "assistant_model")


def generate_in_stages(stage: Any, ranks: PipelineRanks) -> Callable[..., Any] | None:
    """Return what generates tokens; None for a model that does not, or calls parts of itself.

    Args:
        stage: A `SplitModel`.
        ranks: The pipeline.
    """
    whole: Any = stage.whole
    if getattr(getattr(type(whole), "generate", None), "__module__", "") != _LOOP:
        return None  # such as that of peft, which calls the model inside
    if whole.config.is_encoder_decoder:
        return None

    @wraps(whole.generate)
    def generate(*args: Any, **options: Any) -> Any:
        _check(stage, options)
        with _same_numbers(ranks):
            return _stand_in(whole, stage, ranks.device).generate(*args, **options, use_cache=False)

    return generate


def _check(stage: Any, options: dict[str, Any]) -> None:
    if stage.training:
        raise ModelError(
            f"{ROOT}.pipeline: generate() of a model in stages while it is in training mode",
            hint="call model.eval() before, and model.train() after it",
        )
    whole: Any = stage.whole
    config = options.get("generation_config") or whole.generation_config
    for name in _CACHES:
        if options.get(name, getattr(config, name, None)) is not None:
            raise ModelError(
                f"{ROOT}.pipeline: generate({name}=...) of a model in stages, which keep no keys "
                "and values of earlier tokens",
                hint="leave it out; or write the weights with rt.save_pretrained, and use a whole "
                "model in one process",
            )
    options.pop("use_cache", None)


def _stand_in(whole: nn.Module, stage: nn.Module, device: torch.device) -> Any:
    """Return a model of the class of `whole` that runs `stage`."""
    kind = type(whole)

    @wraps(kind.forward)
    def forward(_: Any, *args: Any, **named: Any) -> Any:
        states = torch_states(device)
        try:
            return stage(*args, **named)
        finally:  # a stage may have drawn numbers, of its own layers
            set_torch_states(states, device)

    found: Any = copy.copy(whole)
    dtype = next(param.dtype for param in stage.parameters() if param.is_floating_point())
    own = {"forward": forward, "device": device, "dtype": dtype}
    found.__class__ = type(kind.__name__, (kind,), own)
    return found


@contextlib.contextmanager
def _same_numbers(ranks: PipelineRanks) -> Iterator[None]:
    """Have all ranks of the pipeline draw numbers of the first one, which goes on from there."""
    own = torch_states(ranks.device)
    sent = [SentTensor.of(state) for state in own]
    states = broadcast(sent, list[SentTensor], ranks.rank(0), ranks.group, ranks.device)
    set_torch_states([state.tensor() for state in states], ranks.device)
    try:
        yield
    finally:
        if not ranks.holds(0):
            set_torch_states(own, ranks.device)
