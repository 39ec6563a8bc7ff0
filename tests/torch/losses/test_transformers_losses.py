"""Models of transformers that return their loss: padding counts as in one process."""

import copy
import warnings

import pytest
import torch
from ranks import run_warm

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

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
TEXT = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
SEEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SEEN |= {"num_attention_heads": 4}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=4,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    ),
    "BERT": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            **SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
    ),
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**TEXT, dropout_rate=0, decoder_start_token_id=0)
    ),
    "Mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=2)
    ),
}  # fmt: skip
CONFIGS = {
    "dp 2": {},
    "dp 2, accumulate 2": {"accumulate": 2},
    "zero 1": {"optimizer": {"zero": 1}},
    "zero 3": {"optimizer": {"zero": 3}},
}


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]()


def data():
    """Return batches of padded texts; the texts of the first rank are shorter."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(2):
        tokens = torch.randint(1, 40, (4, 12), generator=draw)
        lengths = torch.tensor([3, 7, 12, 9])
        mask = torch.arange(12) < lengths[:, None]
        ids = tokens.where(mask, 0)
        labels = tokens.where(mask, -100)
        found.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return found


def difference(name, config, prepare=None):
    """Return by how much losses and weights differ from one process."""
    model = build(name)
    if prepare:
        prepare(model)
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    worst = 0.0
    for batch in data():
        plain.zero_grad()
        expected = whole(**batch).loss
        expected.backward()
        plain.step()
        share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
        part = {key: tensor.chunk(count)[share] for key, tensor in batch.items()}
        loss = rt.step(model, update, transformers.BatchEncoding(part))
        worst = max(worst, abs(loss.item() - expected.item()))
    weights = dict(whole.named_parameters())
    for param_name, param in model.named_parameters():
        there = weights[param_name]
        worst = max(worst, (full_tensor(param.detach()) - there).abs().max().item())
    return worst


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_padded_texts_train_as_in_one_process(name, config):
    assert run_warm(difference, 2, name, CONFIGS[config]) == [pytest.approx(0, abs=1e-6)] * 2


PLANNED = {"mesh": {"dp": 2, "tp": 2}, "plan": "auto_tp"}


@pytest.mark.parametrize("name", MODELS)
def test_padded_texts_train_as_in_one_process_beside_a_plan(name):
    assert run_warm(difference, 4, name, PLANNED) == [pytest.approx(0, abs=1e-6)] * 4


def looped(name, config):
    """Return what is said of a plain loop on padded texts."""
    warnings.filterwarnings("ignore", message="msrun: cross_entropy is computed whole")
    rt = msrun.init(config)
    model = rt.shard(build(name))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = data()[0]
    share, count = rt.coordinate["dp"], rt.layout.size("dp")
    model(**{key: tensor.chunk(count)[share] for key, tensor in batch.items()}).loss.backward()
    with pytest.raises(ModelError) as caught:
        update.step()
    return caught.value.message


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_loop_of_a_plan_refuses_padding(name):
    for said in run_warm(looped, 4, name, PLANNED):
        assert said.startswith("the loss of this loop divides cross_entropy by ")


def recompute(model):
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


@pytest.mark.parametrize("config", [*CONFIGS.values(), {"mesh": {"tp": 2}, "plan": "auto_tp"}])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_they_may_recompute_by_themselves(name, config):
    assert run_warm(difference, 2, name, config, recompute) == [pytest.approx(0, abs=2e-6)] * 2


def generated(name, config):
    """Return what a model generates after a step, on all ranks alike, and one process's."""
    model = build(name)
    whole = copy.deepcopy(model)
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = data()[0]
    rt.step(model, update, {key: tensor.chunk(2)[rt.rank] for key, tensor in batch.items()})
    for param_name, param in model.named_parameters():
        whole.get_parameter(param_name).data.copy_(full_tensor(param.detach()))
    prompt = batch["input_ids"][2:3, :4]
    model.eval()
    return [
        each.generate(prompt, max_new_tokens=6, do_sample=False).tolist() for each in (model, whole)
    ]


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_they_generate_after_a_step(name, level):
    config = {"optimizer": {"zero": level}}
    for ours, expected in run_warm(generated, 2, name, config):
        assert ours == expected


def refused(build_model, inputs):
    rt = msrun.init()
    model = rt.shard(build_model())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ModelError) as caught:
        rt.step(model, update, inputs)
    return caught.value.message


def balanced():
    """Return what is said about a mixture of experts that balances them over a batch."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True)
    return refused(lambda: transformers.MixtralForCausalLM(config), data()[0])


def clip():
    """Return what is said about a model that compares the texts and images of a batch."""
    texts = {"vocab_size": 40, "max_position_embeddings": 16, **SEEN}
    images = {"image_size": 8, "patch_size": 4, **SEEN}
    config = transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=8)
    ids = torch.arange(4 * 6).reshape(4, 6) + 1
    inputs = {"input_ids": ids, "pixel_values": torch.randn(4, 3, 8, 8), "return_loss": True}
    return refused(lambda: transformers.CLIPModel(config), inputs)


def test_losses_over_a_batch_are_refused():
    assert "balances experts over a whole batch" in run_warm(balanced, 2)[0]
    assert "compares the 4 samples of this part of the batch" in run_warm(clip, 2)[0]


def vilt():
    config = transformers.ViltConfig(
        **SEEN, vocab_size=40, image_size=8, patch_size=4, num_labels=3,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.ViltForQuestionAnswering(config)


def vilt_difference(config):
    """Return by how much losses and weights differ: its loss is a mean times the labels."""
    torch.manual_seed(3)
    model = vilt()
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    rt = msrun.init(config)
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    draw = torch.Generator().manual_seed(5)
    worst = 0.0
    for step in range(2):
        batch = {
            "input_ids": torch.randint(1, 40, (4, 6), generator=draw),
            "pixel_values": torch.randn(4, 3, 8, 8, generator=draw),
            "pixel_mask": torch.ones(4, 8, 8, dtype=torch.long),
            "labels": torch.rand(4, 3, generator=draw),
        }
        plain.zero_grad()
        torch.manual_seed(step)  # it draws which patches it takes
        expected = whole(**batch).loss
        expected.backward()
        plain.step()
        share = rt.coordinate.get("dp", 0)
        torch.manual_seed(step)
        part = {key: value.chunk(2)[share] for key, value in batch.items()}
        worst = max(worst, abs(rt.step(model, update, part).item() - expected.item()))
    weights = dict(whole.named_parameters())
    gaps = [
        (full_tensor(param.detach()) - weights[name]).abs().max().item()
        for name, param in model.named_parameters()
    ]
    return max(worst, *gaps)


@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 3}}], ids=["dp", "zero 3"])
def test_a_loss_with_a_factor_trains_as_in_one_process(config):
    assert run_warm(vilt_difference, 2, config) == [pytest.approx(0, abs=1e-6)] * 2
