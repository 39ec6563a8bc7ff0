"""Plans that ship, on models of transformers: as one process, no head is gathered."""

import copy
import importlib
import warnings

import pytest
import torch
from ranks import Counted, run_warm

import msrun
from msrun.parallel.local import full_tensor, local_part

pytest.importorskip("transformers")

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
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "use_cache": False}
TEXT = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
HEARD = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "num_mel_bins": 8, "max_source_positions": 16, "use_cache": False,
}  # fmt: skip
SEEN = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SEEN |= {"intermediate_size": 32, "image_size": 16, "patch_size": 4}
WORDS = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
WORDS |= {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
# Name -> class of the model, class and settings of its configuration.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 2}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", WORDS),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        TEXT | {"decoder_start_token_id": 0, "use_cache": False},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", SEEN),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", HEARD),
}
# Settings of dropout, by the name of the configuration.
_DROPPING = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "dropout_rate",
    "embd_pdrop", "hidden_dropout_prob", "resid_pdrop", "activation_dropout",
)  # fmt: skip


def build(name, dropout=0.0, **settings):
    """Return the model `name`, with the same weights wherever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers = importlib.import_module("transformers")
        model, config, sizes = MODELS[name]
        made = getattr(transformers, config)(**{**sizes, **settings})
        for key in _DROPPING:
            if hasattr(made, key):
                setattr(made, key, dropout)
        return getattr(transformers, model)(made)


def data(name, steps=2):
    """Return batches of padded texts, sounds or images, with labels."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        tokens = torch.randint(1, 40, (4, 12), generator=draw)
        mask = torch.arange(12) < torch.tensor([3, 7, 12, 9])[:, None]
        labels = tokens.where(mask, -100)
        if name == "vit":
            images = torch.randn(4, 3, 16, 16, generator=draw)
            found.append({"pixel_values": images, "labels": torch.arange(4) % 2})
        elif name == "whisper":
            sound = torch.randn(4, 8, 32, generator=draw)
            found.append({"input_features": sound, "labels": labels})
        else:
            ids, known = tokens.where(mask, 0), mask.long()
            found.append({"input_ids": ids, "attention_mask": known, "labels": labels})
    return found


CONFIGS = {
    "tp 2": (2, {"mesh": {"tp": 2}}),
    "recompute": (
        2,
        {
            "mesh": {"tp": 2},
            "recompute": {"modules": []},  # of the layers
        },
    ),
    "dp 2 x tp 2": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "zero 1": (4, {"mesh": {"dp": 2, "tp": 2}, "optimizer": {"zero": 1}}),
    "zero 3": (4, {"mesh": {"dp": 2, "tp": 2}, "optimizer": {"zero": 3}}),
}
# The layers of the list of blocks that each model has.
BLOCKS = {"bert": "*layer.[01]", "distilbert": "*layer.[01]", "gpt2": "*h.[01]"}
BLOCKS |= {"t5": "*block.[01]"}


def difference(name, config, dropout=0.0):
    """Return how far losses and weights are off, collectives of a step, and warnings of msrun."""
    model = build(name, dropout)
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    rt = msrun.init(config)
    worst = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = rt.shard(model)
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
        for batch in data(name):
            torch.manual_seed(11)
            plain.zero_grad()
            expected = whole(**batch).loss
            expected.backward()
            plain.step()
            torch.manual_seed(11)
            part = {key: tensor.chunk(count)[share] for key, tensor in batch.items()}
            with Counted() as counts:
                loss = rt.step(model, update, part)
            worst = max(worst, abs(loss.item() - expected.item()))
    weights = dict(whole.named_parameters())
    for param_name, param in model.named_parameters():
        there = weights[param_name]
        worst = max(worst, (full_tensor(param.detach()) - there).abs().max().item())
    said = sorted({str(w.message) for w in caught if "msrun" in str(w.message)})
    return worst, dict(counts.calls), said


def with_plan(name, config, plan):
    config = {**config, "plan": plan}
    if "recompute" in config:
        config["recompute"] = {"modules": [BLOCKS.get(name, "*layers.[01]")]}
    return config


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_auto_tp_equals_one_process_and_nothing_is_computed_whole(name, config):
    ranks, options = CONFIGS[config]
    for worst, _, said in run_warm(difference, ranks, name, with_plan(name, options, "auto_tp")):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "whisper", "distilbert"])
def test_dropout_of_heads_is_that_of_one_process(name):
    config = {"mesh": {"tp": 2}, "plan": "auto_tp"}
    for worst, calls, said in run_warm(difference, 2, name, config, 0.1):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []
        assert set(calls) == {"all_reduce", *SUMMANDS.get(name, {})}


# Two layers: of each, two all-reduces forward and two backward.  One of the embedding, three of
# the loss of sharded logits, and one of its value.
LAYERS, VOCABULARY = 2 * 4, 1 + 3 + 1
CALLS = {
    "llama": LAYERS + VOCABULARY,
    "qwen2": LAYERS + VOCABULARY,
    "qwen3": LAYERS + VOCABULARY,
    "mistral": LAYERS + VOCABULARY,
    "gemma2": LAYERS + VOCABULARY,
    "mixtral": LAYERS + VOCABULARY + 2,  # gradients of the router in each layer
    "gpt2": LAYERS + VOCABULARY,
    "bert": LAYERS + VOCABULARY,
    "distilbert": LAYERS + VOCABULARY,
    "vit": LAYERS,
}
# Gradients of the norms of heads, of all layers.
SUMMANDS = {"qwen3": {"allreduce_": 1}}


@pytest.mark.parametrize("name", CALLS)
def test_a_layer_costs_what_megatrons_does(name):
    config = {"mesh": {"tp": 2}, "plan": "auto_tp"}
    for _, calls, _ in run_warm(difference, 2, name, config):
        assert calls == {"all_reduce": CALLS[name], **SUMMANDS.get(name, {})}


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_a_family_equals_one_process(name):
    config = {"mesh": {"tp": 2}, "plan": name}
    for worst, calls, said in run_warm(difference, 2, name, config):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []
        assert set(calls) == {"all_reduce", *SUMMANDS.get(name, {})}


def generated(name, config):
    """Return how far logits are off, and whether the words that follow are those of one process."""
    model = build(name, use_cache=True).eval()
    whole = copy.deepcopy(model)
    model = msrun.init(config).shard(model)
    batch = data(name)[0]
    with torch.no_grad():
        off = (model(**batch).logits - whole(**batch).logits).abs().max().item()
    inputs = {key: value[2:3] for key, value in batch.items() if key != "labels"}
    texts = [each.generate(**inputs, max_new_tokens=5, do_sample=False) for each in (model, whole)]
    return off, torch.equal(*texts)


@pytest.mark.parametrize("config", ["tp 2", "dp 2 x tp 2", "zero 1", "zero 3"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "t5", "whisper"])
def test_evaluation_and_generation(name, config):
    ranks, options = CONFIGS[config]
    for off, is_same in run_warm(generated, ranks, name, with_plan(name, options, "auto_tp")):
        assert off == pytest.approx(0, abs=1e-5)
        assert is_same


def own_loss(output, labels):
    return torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )


def adapted(plan):
    """Return how far losses and weights of a model with LoRA of peft are off; shapes of parts."""
    peft = importlib.import_module("peft")
    settings = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
        lora_dropout=0.1,
        init_lora_weights=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = peft.get_peft_model(build("llama"), settings)
    whole = copy.deepcopy(model)
    rt = msrun.init({"mesh": {"tp": 2}, "plan": plan})
    model = rt.shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    update = rt.optimizer(torch.optim.SGD(trained, lr=0.1))
    plain = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1)
    worst = 0.0
    for batch in data("llama"):
        torch.manual_seed(11)
        plain.zero_grad()
        expected = whole(**batch).loss
        expected.backward()
        plain.step()
        torch.manual_seed(11)
        worst = max(worst, abs(rt.step(model, update, batch).item() - expected.item()))
    there = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        worst = max(worst, (full_tensor(param.detach()) - there[name]).abs().max().item())
    query = model.base_model.model.model.layers[0].self_attn.q_proj
    parts = query.base_layer, query.lora_A.default, query.lora_B.default
    return worst, [list(local_part(part.weight).shape) for part in parts]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    "plan",
    [
        "auto_tp",
        [
            {"match": "*.[qkv]_proj", "style": "colwise"},
            {"match": "*.o_proj", "style": "rowwise"},
        ],
    ],
)
def test_layers_of_peft_are_sharded_with_their_adapters(plan):
    pytest.importorskip("peft")
    for worst, shapes in run_warm(adapted, 2, plan):
        assert worst == pytest.approx(0, abs=1e-6)
        assert shapes == [[8, 16], [4, 16], [8, 4]]


def loss_of_outputs(name, config):
    """Return the loss of a function that reads `output.logits`, under `config` and alone."""
    model = build(name)
    whole = copy.deepcopy(model)
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = data(name)[0]
    loss = rt.step(model, update, own_loss, batch["input_ids"], batch["labels"])
    return loss.item(), own_loss(whole(batch["input_ids"]), batch["labels"]).item()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_loss_function_reads_attributes_of_outputs(name):
    for found, expected in run_warm(
        loss_of_outputs, 2, name, {"mesh": {"tp": 2}, "plan": "auto_tp"}
    ):
        assert found == pytest.approx(expected, abs=1e-6)
