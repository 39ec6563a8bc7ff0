"""Mixtures of transformers, unmodified: a plan shares their experts out over ranks."""

import copy

import pytest
import torch
from mixtures import RULE
from ranks import run_warm

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor
from msrun.parallel.uneven_rows.rows import rows_of

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
QWEN = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEP = SIZES | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip


def _made(kind, sizes, **more):
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


SWITCH = {
    "vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "num_experts": 4, "expert_capacity": 3,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0,
    "router_jitter_noise": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip


def _of_sequences(kind, sizes):
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


MODELS = {
    "SwitchTransformers": lambda: _of_sequences("SwitchTransformers", SWITCH),
    "OLMoE": lambda: _made("Olmoe", SIZES, num_experts=4, num_experts_per_tok=2),
    "GraniteMoE": lambda: _made("GraniteMoe", SIZES, num_local_experts=4, num_experts_per_tok=2),
    "Mixtral": lambda: _made("Mixtral", SIZES, num_local_experts=4),
    "Mixtral, a loop": lambda: _made(
        "Mixtral", SIZES, num_local_experts=4, experts_implementation="eager"
    ),
    "Mixtral, batched": lambda: _made(
        "Mixtral", SIZES, num_local_experts=4, experts_implementation="batched_mm"
    ),
    "Qwen2-MoE": lambda: _made("Qwen2Moe", QWEN, shared_expert_intermediate_size=16),
    "Qwen3-MoE": lambda: _made("Qwen3Moe", QWEN, head_dim=4),
    "DeepSeek-V3": lambda: _made("DeepseekV3", DEEP),
    "GPT-OSS": lambda: _made("GptOss", SIZES, num_local_experts=4, head_dim=4),
}
CONFIGS = {
    "ep 2": (2, {"mesh": {"ep": 2}}),
    "ep 4": (4, {"mesh": {"ep": 4}}),
    "dp, ep, zero 3": (4, {"mesh": {"dp": 2, "ep": 2}, "optimizer": {"zero": 3}}),
    "dp, ep, recompute, accumulate": (
        4,
        {"mesh": {"dp": 2, "ep": 2}, "recompute": {"modules": ["*layers.*"]}, "accumulate": 2},
    ),
}


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = MODELS[name]()
        with torch.no_grad():  # transformers draws weights too small to show a wrong expert
            for param in model.parameters():
                param.mul_(4) if param.dim() > 1 else None
        return model


def data():
    """Return batches of padded texts."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(3):
        tokens = torch.randint(1, 40, (8, 12), generator=draw)
        lengths = torch.randint(3, 13, (8,), generator=draw)
        mask = torch.arange(12) < lengths[:, None]
        labels = tokens.where(mask, -100)
        found.append(
            {"input_ids": tokens.where(mask, 0), "attention_mask": mask.long(), "labels": labels}
        )
    return found


def difference(name, config, dtype=torch.float32):
    """Return how far losses and weights are from one process."""
    model = build(name).to(dtype)
    whole = copy.deepcopy(model)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    gaps = []
    for batch in data():
        plain.zero_grad()
        expected = whole(**batch).loss
        expected.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        plain.step()
        part = {key: tensor.chunk(count)[share] for key, tensor in batch.items()}
        loss = rt.step(model, update, transformers.BatchEncoding(part), max_norm=0.5)
        gaps.append(abs(loss.item() - expected.item()))
    there = dict(whole.named_parameters())
    for param_name, param in model.named_parameters():
        if param.grad is None or (rows_of(param) and not param.numel()):
            continue
        gap = full_tensor(param.grad) - there[param_name].grad
        gaps.append(gap.abs().max().item())
    return max(gaps)


def case_of(name, config):
    """Return what `run_warm` takes after the function, for one model."""
    ranks, options = CONFIGS[config]
    # Weights of Switch in float32 move further than the limit here; ZeRO 3 refuses another type of
    # its routers, which they cast in place.
    is_wide = name == "SwitchTransformers" and "optimizer" not in options
    dtype = torch.float64 if is_wide else torch.float32
    if "recompute" in options and name == "SwitchTransformers":  # which calls its layers blocks
        options = options | {"recompute": {"modules": ["*coder.block.*"]}}
    return ranks, name, {"plan": [RULE], **options}, dtype


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_of_transformers_trains_as_in_one_process(name, config):
    limit = 5e-5 if (name, config) == ("SwitchTransformers", "dp, ep, zero 3") else 1e-5
    assert max(run_warm(difference, *case_of(name, config))) < limit


def refused():
    """Return what is said about a loss that balances experts over a batch."""
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
    model = rt.shard(_made("Mixtral", SIZES, num_local_experts=4, output_router_logits=True))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ModelError) as caught:
        rt.step(model, update, data()[0])
    return caught.value.message


def test_a_balance_over_a_part_of_the_batch_is_refused():
    assert all("balances experts over a whole batch" in said for said in run_warm(refused, 2))


def saved(folder):
    """Return where the weights of a shared-out model and of its files differ, and back."""
    rt = msrun.init({"mesh": {"dp": 2, "ep": 2}, "plan": [RULE], "optimizer": {"zero": 3}})
    model = rt.shard(build("Mixtral"))
    rt.save_pretrained(model, folder)
    rt.barrier()
    whole = build("Mixtral")
    read = transformers.MixtralForCausalLM.from_pretrained(folder)
    there = dict(read.named_parameters())
    wrong = [n for n, p in whole.named_parameters() if not torch.equal(p, there[n])]
    with rt.init_on_meta():
        other = MODELS["Mixtral"]()
    other = rt.shard(other)
    rt.load_pretrained(other, folder)
    wrong += [
        f"{name} again"
        for name, param in other.named_parameters()
        if not torch.equal(full_tensor(param.detach()), there[name])
    ]
    return wrong


def test_weights_of_shared_out_experts_are_files_of_transformers(tmp_path):
    assert run_warm(saved, 4, str(tmp_path)) == [[]] * 4


def beside_a_named_plan():
    """Return how far a step is from one process, and the shapes of two parameters."""
    plan = [RULE, "mixtral"]
    model = build("Mixtral")
    whole = copy.deepcopy(model)
    rt = msrun.init({"mesh": {"ep": 2, "tp": 2}, "plan": plan})
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = data()[0]
    expected = whole(**batch).loss
    part = {key: tensor.chunk(2)[rt.coordinate["dp"]] for key, tensor in batch.items()}
    loss = rt.step(model, update, transformers.BatchEncoding(part))
    layer = model.model.layers[0]
    shapes = (layer.self_attn.q_proj.weight, layer.mlp.experts.down_proj)
    gap = abs(loss.item() - expected.item())
    return gap, [list(param.to_local().shape) for param in shapes]


@pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank")
def test_experts_beside_the_plan_of_their_family():
    for gap, shapes in run_warm(beside_a_named_plan, 4):
        assert gap < 1e-5
        assert shapes == [[8, 16], [2, 16, 32]]
