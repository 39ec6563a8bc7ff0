"""Plans that ship: how blocks of known families of models are sharded, as data.

A block is a module with members of known names: `q_proj`, `k_proj`, `v_proj` and `o_proj` are
attention as Llama has it, wherever they stand.  So a table of blocks fits every model that is built
of them, and `auto_tp` needs no table of models.

Members of a block are sharded together or not at all: columns first, then rows, so that a block
costs one all-reduce forward and one backward.  Source: Shoeybi et al., "Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from msrun.units import quoted

AUTO = "auto_tp"

# How a member is sharded: a style of a plan rule, with `/3` for three projections in one weight.
_COLUMNS = "colwise"
_ROWS = "rowwise"


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Members of one module that are sharded together.

    Args:
        members: Name below the module -> style, or `colwise/3` for three projections in one.
        optional: The same for members that some modules have.
        beside: Names of other modules that have to be there, where those of members are common.
        has_heads: Whether the columns are heads of attention, which stay whole.
    """

    members: Mapping[str, str]
    optional: Mapping[str, str] = {}
    beside: tuple[str, ...] = ()
    has_heads: bool = False


def _attention(query: str, key: str, value: str, out: str, **optional: str) -> Block:
    members = {query: _COLUMNS, key: _COLUMNS, value: _COLUMNS, out: _ROWS}
    return Block(members=members, optional=optional, has_heads=True)


def _fused(columns: str, rows: str, parts: str = "/3") -> Block:
    return Block(members={columns: f"{_COLUMNS}{parts}", rows: _ROWS}, has_heads=True)


def _feed_forward(*columns: str, rows: str) -> Block:
    return Block(members={**dict.fromkeys(columns, _COLUMNS), rows: _ROWS})


def _convolutions(*columns: str, rows: str, beside: tuple[str, ...], **optional: str) -> Block:
    members = {**dict.fromkeys(columns, _COLUMNS), rows: _ROWS}
    return Block(members=members, optional=optional, beside=beside)


_LLAMA = (
    _attention("q_proj", "k_proj", "v_proj", "o_proj"),
    _feed_forward("gate_proj", "up_proj", rows="down_proj"),
)
_BART = (
    _attention("q_proj", "k_proj", "v_proj", "out_proj"),
    _feed_forward("fc1", rows="fc2"),
)

# Family -> its blocks.  The order is that of the search: of two blocks with a common member the
# first counts.
FAMILIES: dict[str, tuple[Block, ...]] = {
    "bert": (
        _attention("self.query", "self.key", "self.value", "output.dense"),
        _feed_forward("intermediate.dense", rows="output.dense"),
    ),
    "distilbert": (
        _attention("q_lin", "k_lin", "v_lin", "out_lin"),
        _feed_forward("lin1", rows="lin2"),
    ),
    "dit": (
        _attention("to_q", "to_k", "to_v", "to_out.0"),
        _feed_forward("net.0.proj", rows="net.2"),
    ),
    # Squeeze and excitation between them stays whole: it has one pixel, and activations in place.
    "efficientnet": (
        _convolutions("conv_pw", "conv_dw", rows="conv_pwl", beside=("bn3",)),
        _convolutions("conv_exp", rows="conv_pwl", beside=("bn2",)),
    ),
    # Query, key and value follow each other for each head, or for each group of heads.
    "falcon": (
        _fused("query_key_value", "dense", parts=""),
        _feed_forward("dense_h_to_4h", rows="dense_4h_to_h"),
    ),
    "gpt2": (_fused("c_attn", "c_proj"), _feed_forward("c_fc", rows="c_proj")),
    "llama": _LLAMA,
    "mixtral": (*_LLAMA, Block(members={"experts": "experts"})),
    "phi": (_attention("q_proj", "k_proj", "v_proj", "dense"), *_BART[1:]),
    # Three convolutions before two: the first of a bottleneck is the smallest.
    "resnet": (
        _convolutions("conv2", rows="conv3", beside=("bn1", "bn2", "bn3")),
        _convolutions("conv1", rows="conv2", beside=("bn1", "bn2")),
    ),
    "regnet": (
        _convolutions(
            *("conv1.conv", "conv2.conv"),
            rows="conv3.conv",
            beside=("conv1.bn", "conv2.bn"),
        ),
    ),
    "t5": (
        _attention("q", "k", "v", "o", relative_attention_bias=_COLUMNS),
        _feed_forward("wi_0", "wi_1", rows="wo"),
        _feed_forward("wi", rows="wo"),
    ),
    "timm_vit": (_fused("qkv", "proj"), *_BART[1:]),
    "unet": (
        _convolutions("conv1", rows="conv2", beside=("norm1", "norm2"), time_emb_proj=_COLUMNS),
        _attention("to_q", "to_k", "to_v", "to_out.0"),
        _feed_forward("net.0.proj", rows="net.2"),
    ),
    "vit": (_LLAMA[0], *_BART[1:]),
    "wav2vec2": (_BART[0], _feed_forward("intermediate_dense", rows="output_dense")),
    "whisper": _BART,
    "x_transformers": (
        _attention("to_q", "to_k", "to_v", "to_out"),
        _feed_forward("ff.0.0", rows="ff.2"),
        Block(members={"ff.0.proj": f"{_COLUMNS}/2", "ff.2": _ROWS}),
    ),
}
# Models with the blocks of another family.
_ALIASES = {
    "bart": "whisper",
    "bloom": "falcon",
    "electra": "bert",
    "gemma": "llama",
    "gemma2": "llama",
    "gpt_neox": "falcon",
    "mistral": "llama",
    "mobilenet": "efficientnet",
    "opt": "whisper",
    "qwen2": "llama",
    "qwen3": "llama",
    "roberta": "bert",
}
PLAN_NAMES = (AUTO, *sorted({*FAMILIES, *_ALIASES}))


def blocks_of(name: str) -> tuple[Block, ...]:
    """Return the blocks of the plan `name`; `auto_tp` knows those of all families."""
    if name != AUTO:
        return FAMILIES[_ALIASES.get(name, name)]
    known: list[Block] = []
    for blocks in FAMILIES.values():
        known += [block for block in blocks if block not in known]
    return tuple(known)


def unknown_plan(name: str) -> str:
    """Return the sentence that refuses `name`, which is no plan that ships."""
    close = difflib.get_close_matches(name, PLAN_NAMES, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"{quoted(name)} is no plan ({guess}choose {', '.join(PLAN_NAMES)}, or name a file)"
