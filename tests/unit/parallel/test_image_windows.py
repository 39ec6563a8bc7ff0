"""Windows over parts of an image: which rows they read, and how they are split."""

import itertools

import pytest

from msrun.parallel.notation.image_parts import HaloWindows, Split, Window, spans, split

SHAPES = [
    Window(*shape)
    for shape in itertools.product((1, 2, 3, 4, 7), (1, 2, 3), (0, 1, 2, 3), (1, 2, 3))
]


def convolved(values, kernel, window):
    """Return what windows give, with padding on both sides."""
    values = [0] * window.padding + values + [0] * window.padding
    return [
        sum(
            factor * values[at * window.stride + row * window.dilation]
            for row, factor in enumerate(kernel)
        )
        for at in range((len(values) - window.length) // window.stride + 1)
    ]


def resized(values, before, after):
    """Return rows with zeros around them, or without the first or last."""
    values = [0] * before + values[max(0, -before) :]
    return values[: len(values) + after] if after < 0 else values + [0] * after


def added_up(own, others, kernel, window, parted):
    """Return what own rows and those of others, before and after them, give together."""
    found = convolved(own, kernel, window._replace(padding=parted.padding))
    for border, rows in zip((parted.before, parted.after), others, strict=True):
        if border is None:
            assert not rows
            continue
        kernels = kernel[border.kernel : border.kernel + border.kernels]
        read = resized(rows, border.before, border.after)
        some = convolved(read, kernels, window._replace(kernel=len(kernels), padding=0))
        assert len(some) == border.rows
        for at, value in enumerate(some):
            found[border.first + at] += value
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_windows_over_own_rows_and_those_of_others_add_up_to_all(ranks):
    splits = 0
    for window, rows in itertools.product(SHAPES, (41, 96, 240)):
        values = [row * row % 31 + 1 for row in range(rows)]
        kernel = [3, -5, 7, 11, -2, 13, 1][: window.kernel]
        expected = convolved(values, kernel, window)
        assert len(expected) == window.count(rows)
        parts = zip(spans(rows, ranks), spans(len(expected), ranks), strict=True)
        for own, out in parts:
            parted = split(window, rows, own, out)
            if parted is not None:
                splits += 1
                first, end = window.rows(out)
                others = values[max(first, 0) : own[0]], values[own[1] : end]
                found = added_up(values[slice(*own)], others, kernel, window, parted)
                assert found == expected[slice(*out)], (window, rows, own)
    assert splits > 300


def test_the_common_convolution_reads_one_row_of_each_neighbour():
    window = Window(kernel=3, stride=1, padding=1, dilation=1)
    before, after = HaloWindows(0, 1, 0, 1, 0, 0), HaloWindows(31, 1, 2, 1, 0, 0)
    assert split(window, 96, (0, 32), (0, 32)) == Split(1, None, after)
    assert split(window, 96, (32, 64), (32, 64)) == Split(1, before, after)
    assert split(window, 96, (64, 96), (64, 96)) == Split(1, before, None)


@pytest.mark.parametrize(
    ("window", "rows", "own", "out"),
    [
        # More than an eighth of the output reads rows of others.
        (Window(7, 1, 3, 1), 40, (20, 40), (20, 40)),
        # The first own row is read by none.
        (Window(1, 2, 0, 1), 42, (21, 42), (11, 21)),
        # Own rows with as much padding after them as before would make one row more.
        (Window(3, 1, 0, 1), 96, (48, 96), (47, 94)),
    ],
)
def test_windows_that_are_better_computed_at_once_are_not_split(window, rows, own, out):
    assert split(window, rows, own, out) is None
