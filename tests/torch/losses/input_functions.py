"""What models do with an input beside their samples that has as many rows: by chance, or not."""

import torch
from torch import nn
from torch.nn import functional

SAMPLES, WIDTH = 8, 6


def prototypes(h, beside):
    return h @ beside.T


def scaled_prototypes(h, beside):
    keys = functional.normalize(beside, dim=-1)
    return (5 * (functional.normalize(h, dim=-1) @ keys.t())).transpose(0, 1).T


def distances(h, beside):
    return -torch.cdist(h, beside)


def anchors(h, beside):
    return -(h[:, None] - beside[None]).square().sum(-1)


def letters(h, beside):
    return torch.einsum("ic,jc->ij", h, beside)


def as_weights(h, beside):
    return functional.linear(h, beside)


def cosines(h, beside):
    return functional.cosine_similarity(h[:, None], beside[None], dim=-1)


def bank(h, beside):
    return (h @ beside.T).softmax(-1) @ beside


def bank_of_torch(h, beside):
    rows = beside[None]
    return functional.scaled_dot_product_attention(h[None], rows, rows)[0]


def bank_of_a_layer(h, beside):
    torch.manual_seed(2)
    layer, rows = nn.MultiheadAttention(WIDTH, 2, batch_first=True), beside[None]
    return layer(h[None], rows, rows, need_weights=False)[0][0]


def negatives(h, beside):
    """The own value first, then those of the negatives."""
    own = (h * h.detach().roll(1, -1)).sum(-1, keepdim=True)
    return torch.cat([own, h @ beside.T], 1).log_softmax(-1)[:, :1] * h


def sum_of_negatives(h, beside):
    return h - (h @ beside.T).sum(1, keepdim=True)


def closest(h, beside):
    return h * (h @ beside.T).amax(-1)[:, None]


def rows_of_a_table(h, beside):
    """Rows 0 and 1 of any part are there."""
    return h + beside[(h.detach().sum(-1) > 0).long()]


def embeddings(h, beside):
    return h + functional.embedding((h.detach().sum(-1) > 0).long(), beside)


def selected(h, beside):
    return h + beside.index_select(0, (h.detach().sum(-1) > 0).long())


PAIRS = [prototypes, scaled_prototypes, distances, anchors, letters, as_weights, cosines, bank]
PAIRS += [bank_of_torch, bank_of_a_layer, negatives, sum_of_negatives, closest]
TABLES = [rows_of_a_table, embeddings, selected]


# Right in parts.


def of_rows(h, beside):
    return (h + beside) * beside.square().sum(-1, keepdim=True)


def by_numbers(h, beside):
    weights = beside.mean(1)
    return h * weights.view(-1, 1) + weights.cos()[:, None]


def own_pairs(h, beside):
    return h * (h @ beside.T).diagonal()[:, None]


def own_pairs_of_letters(h, beside):
    return h * torch.einsum("ic,ic->i", h, beside)[:, None]


def own_pairs_by_index(h, beside):
    places = torch.arange(len(h))
    return h * (h @ beside.T)[places, places][:, None]


def own_pairs_by_mask(h, beside):
    return h * ((h @ beside.T) * torch.eye(len(h))).sum(1, keepdim=True)


def own_distances(h, beside):
    return h * torch.cdist(h[:, None], beside[:, None]).flatten(1)


def cross_attention(h, beside):
    queries, keys = (x.unflatten(1, (2, 3)) for x in (h, beside))
    return ((queries @ keys.transpose(1, 2)).softmax(-1) @ keys).flatten(1)


def cross_attention_of_torch(h, beside):
    queries, keys = (x.view(len(x), 2, 3) for x in (h, beside))
    return functional.scaled_dot_product_attention(queries, keys, keys).reshape(len(h), WIDTH)


def masks(h, beside):
    is_there = beside > 0
    tokens = h[:, None] * torch.linspace(0.5, 1.5, WIDTH)[:, None]
    scores = (tokens @ tokens.transpose(1, 2)).masked_fill(~is_there[:, None], -1e9)
    return (scores.softmax(-1) @ tokens).sum(1)


def lengths(h, beside):
    """A sum over the first columns of each sample."""
    count = (beside > 0).long().sum(-1)
    return h * (torch.arange(WIDTH)[None] < count[:, None])


def chosen_columns(h, beside):
    return h.gather(1, beside.argsort(-1)) + h[torch.arange(len(h)), beside.argmax(-1)][:, None]


def shown_pairs(h, beside):
    """As the accuracy of a retrieval."""
    with torch.no_grad():
        (h @ beside.T).softmax(-1).argmax(-1).eq(torch.arange(len(h))).float().mean()
    return h * beside


def table_of_all(h, beside):
    """A table that belongs to the model, of which a part of the batch chooses rows."""
    table = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    return h + table[(beside.sum(-1) > 0).long()]


OF_SAMPLES = [of_rows, by_numbers, own_pairs, own_pairs_of_letters, own_pairs_by_index]
OF_SAMPLES += [own_pairs_by_mask, own_distances, cross_attention, cross_attention_of_torch, masks]
OF_SAMPLES += [lengths, chosen_columns, shown_pairs, table_of_all]


def graph(h, beside):
    return beside.softmax(-1) @ h


def graph_of_columns(h, beside):
    return beside.softmax(-1).T @ h


def positions(h, beside):
    """Sequences of as many tokens as there are samples."""
    tokens = h[:, None] * torch.linspace(0.5, 1.5, SAMPLES)[:, None]
    return (tokens * beside[:, :1].cos()).square().sum(1)


def mask_of_tokens(h, beside):
    tokens = h[:, None] * torch.linspace(0.5, 1.5, SAMPLES)[:, None]
    scores = tokens @ tokens.transpose(1, 2)
    return (scores.masked_fill(beside < 0, -1e9).softmax(-1) @ tokens).sum(1)


SQUARE = [graph, graph_of_columns, mask_of_tokens]
FAILING = [*SQUARE, positions]


class Network(nn.Module):
    """Layers, and a function between that gets an input beside, or all of its rows in one."""

    def __init__(self, between):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.last, self.between = nn.Linear(WIDTH, 5), between

    def forward(self, x, beside=None, whole=None):
        h = self.first(x)
        beside = whole[0] if beside is None else beside
        output = self.between(h, beside)
        return self.last(output) if output.shape[1:] == (WIDTH,) else output
