"""What `copies` cannot be combined with is refused by name."""

import pytest

from msrun.errors import ConfigError
from msrun.parallel.config_file import parse_config

PLAN = [{"match": "up", "style": "colwise"}]
GIVEN = {"mesh": {"dp": -1, "tp": 2}, "plan": PLAN, "copies": 2}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"copies": 0}, "copies: 0 must be at least 1"),
        ({"mode": "auto", "plan": []}, "copies: mode auto plans the whole batch"),
        ({"mode": "manual", "plan": []}, "copies: mode manual has its collectives in the script"),
        ({"plan": []}, "copies: without a plan there are no collectives"),
        ({"optimizer": {"zero": 3}}, "copies: optimizer.zero 3 would release"),
        ({"compile": {"modules": ["*"]}}, "copies: compiled modules cannot take turns"),
        ({"batch_norm": "local"}, "copies: batch_norm local leaves the batch norms to each part"),
        ({"dropout": "exact"}, "copies: dropout exact draws the masks of the whole batch"),
        ({"plan": [{"match": "*", "style": "context"}]}, "copies: style context has collectives"),
        ({"data": {"image": ["dp", None, "tp", None]}}, "copies: data has ranks exchange parts"),
        ({"mesh": {"ep": 2}}, "copies: experts over ep have collectives of their own"),
        ({"interleave_num": 3}, "interleave_num: is copies: 3, which is given as 2, too"),
    ],
)
def test_others_are_refused(given, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_config(GIVEN | given)

    assert caught.value.message.startswith(f"parallel.{sentence}")


@pytest.mark.parametrize("word", ["interleave_num", "micro_batch_interleaved"])
def test_words_of_mindspore_are_copies(word):
    config = parse_config({"mesh": {"tp": 2}, "plan": PLAN, word: 2, "accumulate": 3})

    assert (config.copies, config.parts) == (2, 6)


def test_parts_of_a_pipeline_are_slices_of_its_micro_batches():
    pipeline = {"stages": "auto", "microbatches": 3}

    assert parse_config(GIVEN | {"pipeline": pipeline}).parts == 6
