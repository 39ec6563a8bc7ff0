"""Recurrent layers and attention that run over the dim of samples, as if it had a sequence.

Layers of torch without `batch_first` have the sequence in dim 0, and attention of `x[None]` has one
sequence of all samples.  Of a batch with samples first, each sample then depends on those before
it, or on all others.  A batch of data-parallel ranks may have its sequence there, so there
`SampleWatch` warns.  Masks say how long the sequence is and where
it has samples; of a batch with samples first they would not fit.
"""

from __future__ import annotations

from msrun.parallel.losses.calls.marks import Mixture, TorchCall

_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
_LAYER, _ATTENTION = "multi_head_attention_forward", "scaled_dot_product_attention"
_HINT = (
    "right if dim 0 of the batch has the sequence; if it has samples, choose batch_first=True or "
    "transpose what the layer gets; an rt.loader knows which"
)
_FUNCTION_HINT = (
    "right if dim 0 of the batch has the sequence; if it has samples, let each look at all ranks': "
    "rt.gather(x) has them"
)


def over_sequence(call: TorchCall) -> Mixture | None:
    """Return that `call` runs over samples, if it is of a layer whose sequence is in their dim."""
    if call.name in _RECURRENT and not _is_packed(call):
        what, x, dim = "recurrence", call.value(0, "input"), int(call.args[-1])  # batch_first
    elif call.name in (_LAYER, _ATTENTION) and not _has_mask(call):
        what, x = "attention", call.value(1, "key")
        dim = 0 if call.name == _LAYER else x.dim() - 2
    else:
        return None
    mark, own = call.mark(x), call.mark(call.value(0, "query" if what == "attention" else "input"))
    if mark is None or mark.dim != dim or mark.is_guess:
        return None
    if call.samples == 1 or (own and own.inputs != mark.inputs):
        return None  # any dim of one may have it; of other inputs `pairs` knows
    return call.mixture(what)._replace(hint=_FUNCTION_HINT if call.name == _ATTENTION else _HINT)


def _is_packed(call: TorchCall) -> bool:
    """Return whether a recurrent layer gets a packed sequence, and sizes of batches behind it."""
    return not isinstance(call.args[3], bool)


def _has_mask(call: TorchCall) -> bool:
    if call.name == _ATTENTION:
        return call.value(3, "attn_mask") is not None or bool(call.value(5, "is_causal"))
    return any(call.kwargs.get(name) is not None for name in ("attn_mask", "key_padding_mask"))
