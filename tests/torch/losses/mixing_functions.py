"""What models do between layers: functions that mix samples, and others that look so."""

import torch
from torch.nn import functional

WIDTH = 8


def normal(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def normal_in_place(x):
    x = x.clone()
    return x.sub_(x.mean(0, keepdim=True)).mul_(2)


def variance(x):
    return x / (x.square().mean(0) - x.mean(0).square() + 1).sqrt()


def pair_of_statistics(x):
    variance, mean = torch.var_mean(x, 0)
    return (x - mean) / (variance + 1)


def centred_by_constants(x):
    return torch.relu(x - x.detach().mean(0))


def by_one_number(x):
    return x / x.std()


def of_images(x):
    image = x.view(len(x), 2, 2, 2)
    mean = image.mean((0, 2, 3), keepdim=True)
    return (image - mean).square().flatten(1)


def of_tokens(x):
    tokens = x.reshape(-1, 2)
    return (tokens.softmax(-1).mean(0).square() + tokens).view_as(x)


def covariance(x):
    return x * (x.T @ x / len(x)).square().diagonal()


def across(x):
    return x.softmax(0)


def shifted(x):
    return x + x.roll(1, 0)


def reversed_samples(x):
    return x + torch.flip(x, [0])


def first_sample_is_the_reference(x):
    return x - x[:1].square()


def first_half_alone(x):
    return torch.relu(x).narrow(0, 0, len(x) // 2).repeat(2, 1)


def halves_apart(x):
    first, second = x.chunk(2)
    return torch.cat([first.relu(), second.sigmoid()])


def halves_mixed(x):
    first, second = x.split(len(x) // 2)
    return torch.cat([first * second, second])


def by_the_largest(x):
    return x / (1 + x.abs().max())


def by_the_largest_of_columns(x):
    return x * torch.sigmoid(x.detach().amax(0, keepdim=True))


def by_the_largest_kept(x):
    scale = x.detach().abs().max(0).values.clamp(min=1e-3).unsqueeze(0)
    return torch.round(x.detach() / scale) * scale + x


def by_the_median(x):
    return torch.relu(x - x.median(0).values * 2)


def sorted_columns(x):
    return torch.tanh(x.sort(0).values) + x


def running(x):
    return x.cumsum(0).tanh()


def by_a_sum(x):
    return x / (1 + x.square().sum(0))


def mixed_up(x):
    order = torch.randperm(len(x))
    return 0.7 * x + 0.3 * x[order]


def mixed_up_by_index(x):
    order = torch.randperm(len(x)).long()
    return torch.relu(x) * torch.index_select(x, 0, order)


def with_the_next_by_size(x):
    order = x.detach().sum(1).argsort()
    return x - x.gather(0, order[:, None].expand_as(x)) + x[order] * x


def the_largest_alone(x):
    order = x.detach().sum(1).argsort(descending=True)
    return torch.relu(x)[order][: len(x) // 2].repeat(2, 1)


_ORDER = "samples in another order (mixing_functions.py, line"
# As of positions, a plan of mode auto notices none.
BY_ORDER = {
    mixed_up: _ORDER,
    mixed_up_by_index: _ORDER,
    with_the_next_by_size: _ORDER,
    the_largest_alone: _ORDER,
}


def first_half_without(x):
    x = x * 2
    x[: len(x) // 2] = 0
    return x


def first_sample_zeroed(x):
    x = x * 2
    x[0].zero_()
    return x


_TAKEN = "samples by their position"
# What the watch of a model notices, and a plan of mode auto does not.
BY_POSITION = {
    first_sample_is_the_reference: f"{_TAKEN} (mixing_functions.py, line",
    first_half_alone: _TAKEN,
    halves_apart: _TAKEN,
    halves_mixed: _TAKEN,
    first_half_without: _TAKEN,
    first_sample_zeroed: _TAKEN,
}
MIXING = {
    normal: "a std over samples (mixing_functions.py, line 10)",
    normal_in_place: "a mean over samples",
    variance: "a mean over samples",
    pair_of_statistics: "a var_mean over samples",
    centred_by_constants: "a mean over samples",
    by_one_number: "a std over samples",
    of_images: "a mean over samples",
    of_tokens: "a mean over samples",
    covariance: "a matmul over samples",
    across: "a softmax over samples",
    shifted: "a roll over samples",
    reversed_samples: "a flip over samples",
    by_the_largest: "a max over samples",
    by_the_largest_of_columns: "an amax over samples",
    by_the_largest_kept: "a max over samples",
    by_the_median: "a median over samples",
    sorted_columns: "a sort over samples",
    running: "a cumsum over samples",
    by_a_sum: "a sum over samples",
}


def each(x):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


def layer_norm(x):
    return functional.layer_norm(x.view(len(x), 2, 4).transpose(0, 1), (4,)).transpose(0, 1)


def sequence_first(x):
    tokens = x.view(len(x), 4, 2).permute(1, 0, 2)
    return (tokens - tokens.mean(0)).square().transpose(0, 1)


def attention(x):
    tokens = x.view(len(x), 4, 2)
    return (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens


def instance_norm(x):
    return functional.instance_norm(x.view(len(x), 2, 4))


def batch_norm(x):
    return functional.batch_norm(x, None, None, training=True)


def rows(x):
    return torch.stack([torch.relu(row) for row in x])


def sorted_and_back(x):
    order = x.detach().sum(1).argsort()
    return torch.relu(x[order])[order.argsort()]


def weights(x):
    weight = torch.nn.Parameter(torch.eye(WIDTH))
    return x @ (weight - weight.mean(0))


def constants(x):
    table = torch.ones(len(x), WIDTH)
    return x + table.mean(0).square()


def to_a_metric(x):
    metric = x.var(0).mean()
    return x if metric > -1 else -x


def to_a_buffer(x):
    buffer = torch.zeros(WIDTH)
    with torch.no_grad():
        buffer.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x


def by_a_buffer_of_all(x):
    with torch.no_grad():
        mean = x.mean(0)
        mean.copy_(torch.zeros(WIDTH))  # as of a collective
    return torch.relu(x - mean)


def cropped(x):
    longest = int((x > 0).long().sum(1).max())
    return torch.relu(x[:, : max(longest, WIDTH)])


def diagonal_of_pairs(x):
    return torch.relu((x @ x.T).diagonal()[:, None] * x)


def in_chunks(x):
    return torch.cat([torch.relu(part) * 2 for part in x.split(3)])


def one_by_one(x):
    return torch.stack([x[index].sigmoid() for index in range(len(x))])


def two_towers(x):
    together = torch.relu(torch.cat([x, -x]))
    first, second = together.chunk(2)
    return first * second


def by_equal_positions(x):
    positions = torch.arange(WIDTH).expand(len(x), -1)
    return x * torch.sin(positions[0].to(x.dtype))


def all_rows(x):
    return x[:].relu()[: len(x)]


def shuffled_and_back(x):
    order = torch.randperm(len(x))
    return torch.relu(x[order])[order.argsort()] + x


def softmax_by_hand(x):
    powers = torch.exp(x - x.max())
    return powers / powers.sum(1, keepdim=True)


def largest_of_each(x):
    return (
        x / x.abs().amax(1, keepdim=True)
        + x.sort(1).values
        + x.cumsum(-1)
        + x.max(1).values[:, None]
    )


def larger_of_two(x):
    return torch.maximum(x, -x) + torch.max(x, 2 * x)


def padded(x):
    lengths = (x > 0).sum(1)
    mask = torch.arange(lengths.max() + WIDTH)[:WIDTH] < lengths[:, None]
    return x * mask


def negatives(x):
    noise = torch.randint(0, 2, (len(x), 1))
    return x * noise


def columns_written(x):
    x = x * 2
    x[:, :2] = 0
    x[..., 2] = 1
    return x


def rows_written_one_by_one(x):
    x = x * 2
    for index in range(len(x)):
        x[index, :2] = 0.5
    for index in range(len(x)):
        x[index, 2:4].fill_(0.25)
    found = torch.zeros_like(x)
    for index in range(len(x)):
        found[index] = x[index] * 2
    return found


RIGHT = [shuffled_and_back, softmax_by_hand, largest_of_each, larger_of_two, padded, negatives]
RIGHT += [in_chunks, one_by_one, two_towers, by_equal_positions, all_rows]
RIGHT += [each, layer_norm, sequence_first, attention, instance_norm, batch_norm, rows]
RIGHT += [sorted_and_back, weights, constants, to_a_metric, to_a_buffer, by_a_buffer_of_all]
RIGHT += [cropped, diagonal_of_pairs, columns_written, rows_written_one_by_one]
