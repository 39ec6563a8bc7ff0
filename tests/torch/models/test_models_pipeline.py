"""Models of transformers, diffusers and torch, with their own losses, in two stages."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WORDS = 96
DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}


def _words(length=12):
    return torch.randint(5, WORDS, (8, length), generator=torch.Generator().manual_seed(1))


def _mask():
    mask = torch.ones(8, 12, dtype=torch.long)
    mask[2:4, 8:] = 0
    return mask


def _noise(*shape):
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _language(kind, config, **others):
    transformers = pytest.importorskip("transformers")
    name = kind.removesuffix("ForCausalLM").removesuffix("ForMaskedLM").removesuffix("LMHeadModel")
    settings = getattr(transformers, f"{name}Config")(**config)
    words = _words()
    model = getattr(transformers, kind)(settings)
    return model, {"input_ids": words, "labels": words.clone(), **others}


def _gpt2():
    config = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return _language("GPT2LMHeadModel", {"vocab_size": WORDS, **config, **rates})


def _distilbert():
    config = {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64, "dropout": 0}
    config |= {"vocab_size": WORDS, "attention_dropout": 0, "max_position_embeddings": 64}
    return _language("DistilBertForMaskedLM", config, attention_mask=_mask())


def _t5():
    transformers = pytest.importorskip("transformers")
    config = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    settings = transformers.T5Config(
        vocab_size=WORDS, dropout_rate=0, decoder_start_token_id=0, **config
    )
    model = transformers.T5ForConditionalGeneration(settings)
    return model, {"input_ids": _words(), "attention_mask": _mask(), "labels": _words(7)}


def _vit():
    transformers = pytest.importorskip("transformers")
    config = {key: ENCODER[key] for key in ENCODER if key[:3] not in ("voc", "max")}
    settings = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **config)
    model = transformers.ViTForImageClassification(settings)
    return model, {"pixel_values": _noise(3, 16, 16), "labels": torch.arange(8) % 5}


def _whisper():
    transformers = pytest.importorskip("transformers")
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    settings = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=32,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0,
        **sides,
        **tokens,
    )
    model = transformers.WhisperForConditionalGeneration(settings)
    return model, {"input_features": _noise(8, 32), "labels": _words()}


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, source, target, labels):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        output = self.body(source, target, tgt_mask=mask)
        return functional.cross_entropy(self.head(output.mean(1)), labels)


def _translator():
    labels = torch.arange(8) % 5
    return Translator(), {"source": _noise(6, 32), "target": _noise(5, 32), "labels": labels}


class Denoiser(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, image, time, noise):
        return functional.mse_loss(self.network(image, time).sample, noise)


def _unet():
    pytest.importorskip("PIL")
    diffusers = pytest.importorskip("diffusers")
    network = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    image = _noise(3, 16, 16)
    return Denoiser(network), {"image": image, "time": torch.arange(8) * 7, "noise": image.flip(0)}


def _decoder(name, padded=False, **config):  # noqa: FBT002 - a flag of one family
    others = {"attention_mask": _mask()} if padded else {}
    return lambda: _language(f"{name}ForCausalLM", {**DECODER, **config}, **others)


MODELS = {
    "gpt2": _gpt2,
    "llama": _decoder("Llama", padded=True),
    "qwen2 tied": _decoder("Qwen2", tie_word_embeddings=True),
    "qwen3 tied": _decoder("Qwen3", head_dim=8, tie_word_embeddings=True),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=4),
    "mistral": _decoder("Mistral", sliding_window=4),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "bert": lambda: _language("BertForMaskedLM", ENCODER, attention_mask=_mask()),
    "distilbert": _distilbert,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "nn.Transformer": _translator,
    "unet": _unet,
}


def _build(name):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    if name == "mixtral":  # its experts compute in float32 at most
        return model.train(), batch
    return model.double().train(), batch


def _whole(name):
    """Return the losses of three steps in one process, and the weights."""
    model, batch = _build(name)
    update = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        update.zero_grad()
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        update.step()
        losses.append(loss.item())
    named = model.named_parameters(remove_duplicate=False)
    return losses, {name: param.detach().clone() for name, param in named}


def _stages(name, config):
    """Return how far this rank is from one process."""
    losses, weights = _whole(name)
    runtime = msrun.init(config)
    model, batch = _build(name)
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    batch = {key: tensor.chunk(count)[share] for key, tensor in batch.items()}
    part = runtime.shard(model, sample=batch)
    update = runtime.optimizer(torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9))
    found = [runtime.step(part, update, batch).item() for _ in range(3)]
    off = [abs(a - b) for a, b in zip(found, losses, strict=True)]
    for key, param in part.named_parameters():
        off.append((full_tensor(param.detach()) - weights[key]).abs().max().item())
    return max(off)


def _config(**others):
    return {"mesh": {"pp": 2}, "pipeline": {"stages": "auto", "microbatches": 2}, **others}


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_train_as_one_process(name):
    _build(name)  # skips where a package is not there

    # transformers computes losses in float32.
    assert max(run_warm(_stages, 2, name, _config())) < 2e-6


TWO_AXES = {"mesh": {"pp": 2, "dp": 2}}
MLP = "model.layers.*.mlp."
PLAN = [
    {"match": f"{MLP}gate_proj", "style": "colwise"},
    {"match": f"{MLP}up_proj", "style": "colwise"},
    {"match": f"{MLP}down_proj", "style": "rowwise"},
]


@pytest.mark.parametrize(
    ("name", "world", "others"),
    [
        ("gpt2", 4, TWO_AXES),
        ("llama", 4, {**TWO_AXES, "optimizer": {"zero": 1}}),
        ("qwen2 tied", 4, {**TWO_AXES, "optimizer": {"zero": 3}}),
        ("llama", 4, {"mesh": {"pp": 2, "tp": 2}, "plan": PLAN}),
        ("llama", 2, {"recompute": {"modules": ["model.layers.*"]}}),
        *[
            (name, 2, {"pipeline": {"stages": "auto", "microbatches": 4, "schedule": schedule}})
            for name, schedule in (
                ("gpt2", "gpipe"),
                ("llama", "interleaved"),
                ("qwen2 tied", "zbv"),
            )
        ],
    ],
)
def test_stages_combine_with_other_features(name, world, others):
    pytest.importorskip("transformers")

    assert max(run_warm(_stages, world, name, _config(**others))) < 2e-6


def _named_stages():
    """Train GPT-2 with named stages by a loss function, infer, and return what comes out."""
    model, batch = _build("gpt2")
    whole, _ = _build("gpt2")
    where = {"transformer.w*": 0, "transformer.h.[01]": 0, "transformer.*": 1, "lm_head": 1}
    config = {"mesh": {"pp": 2}, "pipeline": {"stages": where, "microbatches": 2}}
    runtime = msrun.init(config)
    words = batch["input_ids"]
    part = runtime.shard(model, sample=[words])
    update = runtime.optimizer(torch.optim.SGD(part.parameters(), lr=0.05))

    def loss(output, target):
        return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    own = torch.optim.SGD(whole.parameters(), lr=0.05)
    off = []
    for length in (12, 9, 12):
        own.zero_grad()
        expected = loss(whole(words[:, :length]), words[:, :length])
        expected.backward()
        own.step()
        found = runtime.step(part, update, loss, words[:, :length], words[:, :length])
        off.append(abs(found.item() - expected.item()))
    output = part.eval()(input_ids=words[:, :5], attention_mask=torch.ones(8, 5))
    expected = whole.eval()(words[:, :5], use_cache=False)
    off.append((output.logits - expected.logits.detach()).abs().max().item())
    return max(off) < 1e-9, type(output) is type(expected), part.config.n_layer


def test_named_stages_follow_lengths_and_infer():
    pytest.importorskip("transformers")

    assert run_warm(_named_stages, 2) == [(True, True, 4)] * 2


def _cached():
    model, batch = _build("llama")
    runtime = msrun.init(_config())
    with pytest.raises(msrun.UsageError) as caught:
        runtime.shard(model, sample={**batch, "use_cache": True})
    return str(caught.value).partition(" (")[0]


def test_a_cache_between_stages_is_refused():
    pytest.importorskip("transformers")
    sentence = "parallel.pipeline.stages: forward hands model.layers.0 an object of DynamicCache"

    assert run_warm(_cached, 2) == [sentence] * 2
