"""`generate()` of transformers on stages: tokens and random numbers are those of one process."""

import pytest
import torch
from ranks import run_warm

import msrun

pytestmark = pytest.mark.torch
PIPELINE = {"stages": "auto", "microbatches": 2}
WORDS = torch.arange(20).view(4, 5) + 3
PADDED = torch.ones_like(WORDS).index_fill(1, torch.tensor([0]), 0)
OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "beams": {"num_beams": 3},
    "padded": {"attention_mask": PADDED},
    "cached": {"use_cache": True},
}


def build():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def generated(config):
    """Return the tokens of each way, and a number that is drawn after them."""
    rt = msrun.init(config)
    model = rt.shard(build(), sample=(WORDS,))
    found = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(5 + rt.coordinate.get("pp", 0))  # the numbers of the first stage count
        tokens = model.generate(WORDS, max_new_tokens=4, pad_token_id=0, **options)
        found[name] = tokens.tolist(), torch.rand(()).item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "tp": 2}])
def test_stages_generate_what_one_process_generates(axes):
    pytest.importorskip("transformers")
    expected = run_warm(generated, 1, {})[0]
    plan = {"plan": "auto_tp"} if "tp" in axes else {}

    answers = run_warm(generated, 2 * len(axes), {"mesh": axes, "pipeline": PIPELINE, **plan})

    assert answers[0] == expected
    for found in answers:
        assert {name: each[0] for name, each in found.items()} == {
            name: each[0] for name, each in expected.items()
        }


def refused():
    rt = msrun.init({"mesh": {"pp": 2}, "pipeline": PIPELINE})
    model = rt.shard(build(), sample=(WORDS,))
    said = []
    for options in ({"cache_implementation": "static"}, {"past_key_values": ()}):
        with pytest.raises(msrun.UsageError) as error:
            model.generate(WORDS, **options)
        said.append(str(error.value))
    model.whole.generation_config.cache_implementation = "static"  # as some models come
    with pytest.raises(msrun.UsageError) as error:
        model.generate(WORDS)
    said.append(str(error.value))
    model.whole.generation_config.cache_implementation = None
    model.train()
    with pytest.raises(msrun.UsageError, match=r"training mode\nhint: call model.eval\(\) before"):
        model.generate(WORDS)
    return said


@pytest.mark.slow
def test_a_cache_and_training_mode_are_refused():
    pytest.importorskip("transformers")
    said = "parallel.pipeline: generate({}=...) of a model in stages, which keep no keys and values"

    for sentences in run_warm(refused, 2):
        names = ("cache_implementation", "past_key_values", "cache_implementation")
        for name, sentence in zip(names, sentences, strict=True):
            assert sentence.startswith(said.format(name))


class Wrapped(torch.nn.Module):
    """As peft has it: its `generate` calls the model inside."""

    def __init__(self):
        super().__init__()
        self.inside = build()
        self.config = self.inside.config

    def forward(self, input_ids):
        return self.inside(input_ids, use_cache=False)

    def prepare_inputs_for_generation(self, *args, **options):
        return self.inside.prepare_inputs_for_generation(*args, **options)

    def generate(self, *args, **options):
        return self.inside.generate(*args, **options)


def wrapped():
    rt = msrun.init({"mesh": {"pp": 2}, "pipeline": PIPELINE})
    model = rt.shard(Wrapped(), sample=(WORDS,)).eval()
    with pytest.raises(msrun.UsageError) as error:
        model.generate(WORDS)
    return error.value.message


@pytest.mark.slow
def test_a_loop_of_another_kind_is_refused():
    pytest.importorskip("transformers")
    said = "parallel.pipeline: generate is of Wrapped, of which this rank has one stage"
    assert run_warm(wrapped, 2) == [said] * 2
