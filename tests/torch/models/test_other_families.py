"""Families of diffusers and peft that the table of models leaves out, in some columns."""

import importlib
from functools import partial

import model_table
import pytest
import torch
from torch import nn
from zoo_entry import SAMPLES, TEXT, ZooModel, labelled, of, squared

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # Of transformers, for a name that peft uses.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]


def noise(*shape):
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


def stable_diffusion():
    """Return the entry of the transformer of Stable Diffusion 3."""
    make = partial(
        of,
        *("diffusers", "SD3Transformer2DModel"),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    return ZooModel(
        needs="diffusers",
        make=make,
        inputs=lambda: (noise(4, 8, 8), noise(6, 16), noise(16), torch.arange(SAMPLES)),
        target=partial(noise, 4, 8, 8),
        loss=squared,
        blocks=["transformer_blocks"],
        plan="auto_tp",
    )


class Placed(nn.Module):
    """A transformer of Flux that has the places of its image and text."""

    def __init__(self):
        super().__init__()
        self.transformer = of(
            *("diffusers", "FluxTransformer2DModel"),
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            guidance_embeds=False,
            axes_dims_rope=(2, 2, 4),
        )
        self.register_buffer("image_places", torch.randn(9, 3))
        self.register_buffer("text_places", torch.zeros(6, 3))

    def forward(self, image, text, pooled, time):
        places = self.image_places, self.text_places
        return self.transformer(image, text, pooled, time, *places).sample


def flux():
    """Return the entry of the transformer of Flux."""
    return ZooModel(
        needs="diffusers",
        make=Placed,
        inputs=lambda: (noise(9, 4), noise(6, 16), noise(16), torch.arange(SAMPLES) / 8.0),
        target=partial(noise, 9, 4),
        loss=squared,
        blocks=["transformer.transformer_blocks", "transformer.single_transformer_blocks"],
        plan="auto_tp",
    )


def adapted(settings, **options):
    """Return the entry of a Llama that peft adapts."""

    def make():
        peft = importlib.import_module("peft")
        model = of("transformers", "LlamaForCausalLM", "LlamaConfig", **TEXT)
        found = peft.get_peft_model(model, getattr(peft, settings)(**options))
        for param in found.parameters():
            if param.requires_grad and not param.any():  # nothing reaches the others then
                nn.init.normal_(param, std=0.1)
        return found

    blocks = ["base_model.model.model.layers"] if "target_modules" in options else []
    return ZooModel(
        needs="peft",
        make=make,
        inputs=labelled,
        blocks=blocks or ["base_model.model.layers"],
        plan="auto_tp",
    )


FAMILIES = {
    "Stable Diffusion 3": stable_diffusion(),
    "Flux": flux(),
    "DoRA": adapted("LoraConfig", r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "IA3": adapted(
        "IA3Config",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "prompt tuning": adapted("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("column", ["dp", "zero 3", "tp", "pp", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_in_one_process(family, column):
    pytest.importorskip(FAMILIES[family].needs)
    limit = model_table.LIMIT
    assert model_table.run_cell(FAMILIES[family], column, limit) == "equal"
