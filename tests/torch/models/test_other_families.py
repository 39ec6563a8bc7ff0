"""Families of transformers and diffusers that the table of models leaves out, in some columns."""

from functools import partial

import model_table
import pytest
import torch
from zoo_entry import SAMPLES, ZooModel, of, squared
from zoo_text import decoder, model_of

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "experts_implementation": "eager",
}


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


FAMILIES = {
    "Phi3": decoder("Phi3", "auto_tp"),
    "Gemma 3": model_of(
        *("Gemma3ForCausalLM", "Gemma3TextConfig", "model.layers"),
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        query_pre_attn_scalar=4,
        sliding_window=4,
        use_cache=False,
        plan="auto_tp",
    ),
    "DeepSeek-V3": decoder("DeepseekV3", "auto_tp", **LATENT),
    "Stable Diffusion 3": stable_diffusion(),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("column", ["dp", "zero 3", "tp", "pp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_in_one_process(family, column):
    pytest.importorskip(FAMILIES[family].needs)
    limit = model_table.LIMIT
    assert model_table.run_cell(FAMILIES[family], column, limit) == "equal"
