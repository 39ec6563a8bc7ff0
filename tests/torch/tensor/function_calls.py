"""Calls of every function that runs on shards, and of some that must not, on a tensor of SHAPE."""

import torch
from torch.nn import functional

SHAPE = (4, 6, 8)
# How a function is called on a tensor of SHAPE: one call a name, or several.
CALLS = {
    "abs": torch.abs,
    "add": lambda x: torch.add(x, x, alpha=2),
    "add_": lambda x: (x * 1).add_(x),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "bfloat16": lambda x: x.bfloat16().float(),
    "cos": torch.cos,
    "div": lambda x: torch.div(x, 3.0),
    "div_": lambda x: (x * 1).div_(3.0),
    "elu": functional.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "float": lambda x: x.float(),
    "gelu": lambda x: functional.gelu(x) + functional.gelu(x, approximate="tanh"),
    "half": lambda x: x.half().float(),
    "hardtanh": functional.hardtanh,
    "leaky_relu": functional.leaky_relu,
    "log": lambda x: torch.log(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "mul": lambda x: torch.mul(x, x),
    "mul_": lambda x: (x * 1).mul_(2.0),
    "neg": torch.neg,
    "pow": lambda x: torch.pow(x, 3),
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 1),
    "relu": functional.relu,
    "relu_": lambda x: (x * 1).relu_(),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "rsub": lambda x: torch.rsub(x, 1.0),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": torch.sin,
    "softplus": functional.softplus,
    "sqrt": lambda x: torch.sqrt(x.abs() + 1),
    "square": torch.square,
    "sub": lambda x: torch.sub(x, 1.0),
    "sub_": lambda x: (x * 1).sub_(1.0),
    "tanh": torch.tanh,
    "to": lambda x: x.to(torch.float64).to(torch.float32),
    "true_divide": lambda x: torch.true_divide(x, 2.0),
    "type_as": lambda x: x.type_as(x),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "__add__": lambda x: x + x,
    "__iadd__": lambda x: add_in_place(x * 1, x),
    "__imul__": lambda x: multiply_in_place(x * 1, x),
    "__isub__": lambda x: subtract_in_place(x * 1, x * 2),
    "__mul__": lambda x: x * x,
    "__neg__": lambda x: -x,
    "__pow__": lambda x: x**2,
    "__radd__": lambda x: 1 + x,
    "__rmul__": lambda x: 2 * x,
    "__rpow__": lambda x: 2**x,
    "__rsub__": lambda x: 1 - x,
    "__rtruediv__": lambda x: 1 / (x.abs() + 1),
    "__sub__": lambda x: x - x * 3,
    "__truediv__": lambda x: x / (x.abs() + 1),
    "chunk": lambda x: torch.cat([part * 2 for part in x.chunk(2, -1)], -1),
    "clone": torch.clone,
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "detach": lambda x: x + x.detach(),
    "broadcast_to": lambda x: torch.broadcast_to(x.unsqueeze(0), (3, *SHAPE)),
    "expand": lambda x: x.unsqueeze(0).expand(3, *SHAPE),
    "flatten": lambda x: x.flatten(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "reshape": lambda x: x.reshape(4, 6, 2, 4),
    "split": lambda x: x.split(4, -1)[1],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "t": lambda x: x.flatten(0, 1).t(),
    "transpose": lambda x: x.transpose(1, -1),
    "unflatten": lambda x: x.unflatten(-1, (2, 4)),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "view": lambda x: x.view(4, 6, 4, 2).view(4, 6, 8),
    "view_as": lambda x: x.view_as(x),
    "addmm": lambda x: torch.addmm(WEIGHT[0], x.flatten(0, 1), WEIGHT),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    # Squares of what is normalized alone have hardly a gradient.
    "layer_norm": lambda x: functional.layer_norm(x, (8,)).sigmoid(),
    "rms_norm": lambda x: functional.rms_norm(x, (8,), WEIGHT[0]).sigmoid(),
    "linear": lambda x: functional.linear(x, WEIGHT),
    "matmul": lambda x: torch.matmul(x, WEIGHT),
    "mean": lambda x: x.mean(-1) + x.mean(),
    "softmax": lambda x: functional.softmax(x, dim=-1) + x.softmax(1),
    "sum": lambda x: x.sum(1),
    "__matmul__": lambda x: x @ WEIGHT,
    # On each rank's shard, unless a sharded dim takes part.
    "__getitem__": lambda x: (
        x[:, 1] + x[:, None, -1, :][:, 0] + x[..., 0, :] + x[:, 1:2].sum(1) + x[:, [-1, 0]].sum(1)
    ),
    "unbind": lambda x: sum(x.unbind(1)) + sum(torch.unbind(x.transpose(0, 1))),
    "split in two sizes": lambda x: x.split([2, 4], 1)[1],
    "cat of rows": lambda x: torch.cat((x, x * 2)),
    # Not on the list: torch has them wrong, or not at all, so they run whole.
    "cumsum": lambda x: torch.cumsum(x, dim=-1),
    "unfold": lambda x: x.unfold(-1, 3, 1),
    "roll": lambda x: torch.roll(x, 1, -1),
    "cat": lambda x: torch.cat([x, x * 2], dim=1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "conv2d": lambda x: functional.conv2d(x.unsqueeze(1), FILTER, padding=1),
    "conv2d of channels": lambda x: functional.conv2d(x.unsqueeze(0), FILTERS, stride=2),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(
        x.unsqueeze(1), FILTER.transpose(0, 1)
    ),
    "max_pool2d": lambda x: functional.max_pool2d(x.unsqueeze(0), 2),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 1, 1),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: functional.instance_norm(x, eps=1e-3),
    "group_norm": lambda x: functional.group_norm(x, 3),
    "cdist": lambda x: torch.cdist(x, x * 0.5),
    "nonzero": lambda x: x * len(torch.nonzero(x)),
    # They draw, so each rank must have the numbers of the whole.
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout2d": lambda x: functional.dropout2d(x.unsqueeze(0), 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "conv1d": lambda x: functional.conv1d(x, KERNEL, padding=1),
    "max_pool1d": lambda x: functional.max_pool1d(x, 2),
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    # Their results stay unused: what counts is what they wrote.
    "clamp_": lambda x: written(x, lambda y: y.clamp_(min=0)),
    "copy_": lambda x: written(x, lambda y: y.copy_(x[0] * 2)),
    "masked_fill_": lambda x: written(x, lambda y: y.masked_fill_(y > 0, 0.5)),
    "__setitem__": lambda x: written(x, lambda y: y.__setitem__((slice(None), 0), 0.5)),
    "dropout in place": lambda x: written(x, lambda y: functional.dropout(y, 0.5, inplace=True)),
    "relu in place": lambda x: written(x, lambda y: functional.relu(y, inplace=True)),
    "hardtanh in place": lambda x: written(x, lambda y: functional.hardtanh(y, inplace=True)),
    # A sum that is still pending must not be taken for the whole.
    "item": lambda x: x * x.sum().item(),
    "einsum": lambda x: torch.einsum("bsd,bsd->bd", x, x),
    # On each rank's shard, where the dims that they read are whole.
    "all": lambda x: x * (x > 0).all(-1, keepdim=True) + x * (x > 0).all(1, keepdim=True),
    "amax": lambda x: x.amax(-1) + x.amax((1, 2), keepdim=True).squeeze(1),
    "amin": lambda x: x.amin(1),
    "any": lambda x: x * (x > 1).any(1, keepdim=True),
    "argmax": lambda x: x * x.argmax(-1, keepdim=True) + x.argmax(1, keepdim=True),
    "argmin": lambda x: x * x.argmin(1, keepdim=True),
    "argsort": lambda x: x * x.argsort(1) + x.argsort(),
    "count_nonzero": lambda x: x[:, 0] * (x > 0).count_nonzero(1),
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(1)[0],
    "cumprod": lambda x: x.cumprod(1),
    "diff": lambda x: x.diff()[..., :1] + x.diff(dim=1).sum(1, keepdim=True),
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logsumexp": lambda x: x.logsumexp(-1) + x.logsumexp((1, 2), keepdim=True).squeeze(1),
    "max": lambda x: x.max(1).values + x.max(-1)[0][:, :1] + x.max(),
    "median": lambda x: x.median(1).values,
    "min": lambda x: torch.min(x, 1, keepdim=True).values + x.min(),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "norm of a dim": lambda x: x.norm(2, 1) + torch.norm(x, dim=-1)[:, :1],
    "prod": lambda x: x.prod(1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "select": lambda x: x.select(1, 2),
    "sort": lambda x: x.sort(1).values + torch.sort(x, descending=True)[0],
    "std": lambda x: x.std(1) + x.std(-1, keepdim=True)[:, :1, 0],
    "topk": lambda x: x.topk(2, 1).values + x.topk(2).values[:, :1, :1],
    "unfold of a dim": lambda x: x.unfold(1, 3, 2),
    "var": lambda x: x.var(1, unbiased=False),
    "glu": lambda x: functional.glu(x, 1),
    "normalize": lambda x: functional.normalize(x) + functional.normalize(x, dim=-1),
    "softmin": lambda x: functional.softmin(x, 1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "adaptive_avg_pool1d": lambda x: functional.adaptive_avg_pool1d(x, 4),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, (2, None)),
    "adaptive_avg_pool3d": lambda x: functional.adaptive_avg_pool3d(x.unsqueeze(0), 2),
    "avg_pool1d": lambda x: functional.avg_pool1d(x, 2),
    "avg_pool3d": lambda x: functional.avg_pool3d(x.unsqueeze(0), 2),
    "max_pool3d": lambda x: functional.max_pool3d(x.unsqueeze(0), 2),
    "adaptive_max_pool1d": lambda x: functional.adaptive_max_pool1d(x, 4),
    "adaptive_max_pool2d": lambda x: functional.adaptive_max_pool2d(x, 2),
    "adaptive_max_pool3d": lambda x: functional.adaptive_max_pool3d(x.unsqueeze(0), 2),
    "lp_pool1d": lambda x: functional.lp_pool1d(x, 2, 2),
    "lp_pool2d": lambda x: functional.lp_pool2d(x, 2, 2),
    "max_pool1d_with_indices": lambda x: functional.max_pool1d(x, 2, return_indices=True)[0],
    "max_pool2d_with_indices": lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
    "max_pool3d_with_indices": lambda x: functional.max_pool3d(
        x.unsqueeze(0), 2, return_indices=True
    )[0],
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x.unflatten(0, (1, 4)), 2),
    "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x, 2),
    "tril": lambda x: x.tril(1) + torch.tril(x),
    "triu": lambda x: x.triu(1) + torch.triu(x),
    "view_as_complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (4, 2))) * TURN
    ),
    "flip": lambda x: x.flip(1) + torch.flip(x, (1,)),
    "pad": lambda x: functional.pad(x, (1, 2)) + functional.pad(x, (0, 3, 0, 0)),
    "interpolate": lambda x: functional.interpolate(x.unsqueeze(0), scale_factor=2.0),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    # By letters.
    "einsum of heads": lambda x: torch.einsum("bsd,btd->bst", x, x * 2),
    "einsum of a weight": lambda x: torch.einsum("...d,df->...f", x, WEIGHT),
    "einsum of sums": lambda x: torch.einsum("bsd,d->bs", x, WEIGHT[0]) + x.sum((1, 2))[:, None],
    "einsum of a diagonal": lambda x: torch.einsum("bsd,dd->bs", x, WEIGHT),
    "einsum without an arrow": lambda x: torch.einsum("bsd, dk", x, WEIGHT),
    "gather": lambda x: x.gather(1, INDEX) + x.gather(-1, INDEX.flip(-1)),
    "gather of fewer": lambda x: x.gather(1, INDEX[:2, :, :4]),
    "scatter": lambda x: x.scatter(1, INDEX, x * 2) + x.scatter(1, INDEX, 0.5),
    "scatter_add": lambda x: x.scatter_add(1, INDEX, x * 2),
    "take_along_dim": lambda x: x.take_along_dim(INDEX, 1),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 5, 2])),
    "atan2": lambda x: torch.atan2(x, x * 2),
    "ceil": lambda x: x * x.ceil(),
    "clamp": lambda x: x.clamp(-0.5, 0.5) + torch.clamp(x, min=WEIGHT[0]),
    "clamp_max": lambda x: x.clamp_max(0.5),
    "clamp_min": lambda x: x.clamp_min(0.5),
    "cosh": torch.cosh,
    "eq": lambda x: x * x.eq(x) * torch.eq(x, 1),
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "floor": lambda x: x * x.floor(),
    "fmod": lambda x: torch.fmod(x, 0.7),
    "ge": lambda x: x * x.ge(0),
    "gt": lambda x: x * x.gt(WEIGHT[0]),
    "isfinite": lambda x: x * x.isfinite(),
    "isinf": lambda x: x * x.isinf(),
    "isnan": lambda x: x + x.isnan(),
    "le": lambda x: x * x.le(0.3),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "log10": lambda x: torch.log10(x.abs() + 1),
    "log2": lambda x: torch.log2(x.abs() + 1),
    "logaddexp": lambda x: torch.logaddexp(x, WEIGHT[0]),
    "logical_and": lambda x: x * torch.logical_and(x > 0, x < 1),
    "logical_not": lambda x: x * torch.logical_not(x > 0),
    "logical_or": lambda x: x * torch.logical_or(x > 1, x < 0),
    "lt": lambda x: x * x.lt(0.3),
    "maximum": lambda x: torch.maximum(x, WEIGHT[:6] * 0.5),
    "minimum": lambda x: torch.minimum(x, x[:, :1]),
    "nan_to_num": lambda x: x.nan_to_num(1.0),
    "ne": lambda x: x * x.ne(0.3),
    "remainder": lambda x: torch.remainder(x, 0.7),
    "round": lambda x: x * x.round(),
    "sign": lambda x: x * x.sign(),
    "sinh": torch.sinh,
    "tan": torch.tan,
    "trunc": lambda x: x * x.trunc(),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 1),
    "__floordiv__": lambda x: x * (x.detach() // 0.5),
    "__mod__": lambda x: x % 0.5,
    "__rdiv__": lambda x: 1 / (x.abs() + 1),
    "__xor__": lambda x: x * ((x > 1) ^ (x > 0)),
    "__and__": lambda x: x * ((x > 0) & (x < 1)),
    "__eq__": lambda x: x * (x == x.abs()),
    "__ge__": lambda x: x * (x >= 0),
    "__gt__": lambda x: x * (WEIGHT[0] > x),
    "__invert__": lambda x: x * ~(x > 0),
    "__le__": lambda x: x * (x <= 0),
    "__lt__": lambda x: x * (x < 0),
    "__ne__": lambda x: x * (x != 0),
    "__or__": lambda x: x * ((x > 1) | (x < 0)),
    "celu": lambda x: functional.celu(x, 0.5) + torch.celu(x),
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "logsigmoid": functional.logsigmoid,
    "mish": functional.mish,
    "relu6": lambda x: functional.relu6(x * 5),
    "selu": lambda x: functional.selu(x) + torch.selu(x),
    "softsign": functional.softsign,
    "tanhshrink": functional.tanhshrink,
    "full_like": lambda x: x * torch.full_like(x, 0.5),
    "ones_like": lambda x: x + torch.ones_like(x, dtype=torch.float32),
    "zeros_like": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    # Samples, channels, groups.
    "conv1d of groups": lambda x: functional.conv1d(x, KERNEL[:, :3], KERNEL[:, 0, 0], groups=2),
    "conv1d of one channel a group": lambda x: functional.conv1d(
        x, KERNEL[:, :1], padding="same", groups=6
    ),
    "conv3d": lambda x: functional.conv3d(x[:, None, None], CUBE, padding=1),
    "conv_transpose1d": lambda x: functional.conv_transpose1d(x, KERNEL, KERNEL[0, :, 0], 2, 1, 1),
    "conv_transpose1d of groups": lambda x: functional.conv_transpose1d(
        x, KERNEL[:, :3], groups=2, dilation=2
    ),
    "conv_transpose3d": lambda x: functional.conv_transpose3d(
        x[:, None].unflatten(-1, (4, 2)), CUBE.transpose(0, 1)
    ),
    "group_norm of two": lambda x: functional.group_norm(x, 2, KERNEL[:, 0, 0], KERNEL[0, :, 1]),
}
# Of integers, so it has a test of its own.
APART = {"embedding"}
# Names by which torch calls what `CALLS` has already.
SYNONYMS = {"concat", "linalg_vector_norm", "log_sigmoid", "norm", "view_as_real"}
WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)
KERNEL = torch.linspace(-1, 1, 6 * 6 * 3).view(6, 6, 3)
FILTER = torch.linspace(-1, 1, 2 * 3 * 3).view(1, 2, 3, 3).transpose(0, 1).contiguous()
CUBE = torch.linspace(-1, 1, 2 * 27).view(2, 1, 3, 3, 3)
INDEX = torch.arange(4 * 6 * 8).view(4, 6, 8) % 6
TURN = torch.polar(torch.ones(4), torch.arange(4.0))
FILTERS = torch.linspace(-1, 1, 2 * 4 * 3 * 3).view(2, 4, 3, 3)


def written(x, write):
    y = x * 1
    write(y)
    return y


def add_in_place(x, y):
    x += y
    return x


def subtract_in_place(x, y):
    x -= y
    return x


def multiply_in_place(x, y):
    x *= y
    return x


def add_relative(x):
    """Return the scores of heads, with those of places, as SpeechT5 has them."""
    heads = x.view(4, 6, 4, 2).transpose(1, 2).reshape(16, 6, 2)
    scores = torch.bmm(heads, heads.detach().transpose(1, 2))
    places = heads.contiguous().view(16, 6, 2).transpose(0, 1) @ PLACES
    return scores + places.transpose(0, 1)


PLACES = torch.linspace(-1, 1, 72).view(6, 2, 6)
# Of heads, so they have a test of their own.
OF_HEADS = {"gradients of two layouts": add_relative}
