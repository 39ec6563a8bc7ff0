"""Has a model, or a stage of it, compute on parts of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.config import ParallelConfig
from msrun.parallel.images.division import KEY, ImageDims, Images
from msrun.parallel.rank_context import RankContext
from msrun.parallel.sharded_model import refuse_copies
from msrun.parallel.torch_compat import is_compiled, is_compiled_in_place

if TYPE_CHECKING:
    from msrun.parallel.pipeline.split_model import SplitModel


def divide_images(config: ParallelConfig, context: RankContext, model: nn.Module) -> Images:
    """Return what has `model`, or a stage of it, compute on parts of images.

    Raises:
        ModelError: It has a module that is compiled.
    """
    for name, module in model.named_modules():
        if is_compiled(module) or is_compiled_in_place(module):
            raise ModelError(
                f"{KEY}: parts of images are followed while the model runs, and "
                f"{name or type(module).__name__} is compiled",
                hint="give rt.shard the model before torch.compile",
            )
    refuse_copies(model, f"{KEY} over {', '.join(context.configured.layout.images)}")
    dims = ImageDims(config, context)
    if config.pipeline is None:
        return Images(dims)
    from msrun.parallel.images.stages import StageImages

    images = StageImages(dims)
    cast("SplitModel", model).follow(images)
    return images
