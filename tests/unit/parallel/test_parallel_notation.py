"""Notations of how tensors are cut: which rank holds what, MindSpore's rules, refusals."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.parallel.notation.device_matrix import Layout
from msrun.parallel.notation.dims import axes_of_dims, module_dims, strategy_dims
from msrun.parallel.notation.mesh_layout import MeshLayout, local_slices

CUBE = {"a": 2, "b": 2, "c": 2}
MATMUL = "mk,kn->mn"
LINEAR = "...k,nk->...n"


def refusal(call, *args, **options):
    with pytest.raises(UsageError) as caught:
        call(*args, **options)
    return caught.value.message


def numbers(found):
    return [(part.start, part.stop) for part in found]


@st.composite
def cuts(draw):
    """Return a mesh, a shape, and axes in any order on each of its dims."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    axes = {f"x{index}": size for index, size in enumerate(sizes)}
    order = draw(st.permutations(list(axes)))
    used = order[: draw(st.integers(0, len(order)))]
    ndim = draw(st.integers(1, 3))
    dims = [[] for _ in range(ndim)]
    for axis in used:
        dims[draw(st.integers(0, ndim - 1))].append(axis)
    shape = [math.prod(axes[axis] for axis in dim) * draw(st.integers(1, 3)) for dim in dims]
    return axes, shape, dims


@given(cuts())
def test_ranks_hold_every_element_equally_often(cut):
    axes, shape, dims = cut
    layout = MeshLayout(axes)
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)

    for rank in range(layout.world_size):
        own = local_slices(shape, dims, layout, rank)
        for index in itertools.product(*(range(part.start, part.stop) for part in own)):
            counts[index] += 1

    copies = layout.world_size // math.prod(axes[axis] for dim in dims for axis in dim)
    assert set(counts.values()) == {copies}


@given(cuts())
def test_the_first_axis_is_the_most_significant(cut):
    axes, shape, dims = cut
    layout = MeshLayout(axes)
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        for part, size, dim in zip(
            local_slices(shape, dims, layout, rank), shape, dims, strict=True
        ):
            start = 0
            for axis in dim:
                size //= axes[axis]  # noqa: PLW2901 - it shrinks with every axis
                start += at[axis] * size
            assert (part.start, part.stop) == (start, start + size)


def test_the_example_of_mindspore():
    layout = MeshLayout({"dp": 2, "sp": 2, "mp": 2})
    dims = ["mp", ["sp", "dp"]]

    found = {rank: numbers(local_slices((2, 8), dims, layout, rank)) for rank in (0, 4, 2, 6, 1)}

    assert found == {
        0: [(0, 1), (0, 2)],
        4: [(0, 1), (2, 4)],
        2: [(0, 1), (4, 6)],
        6: [(0, 1), (6, 8)],
        1: [(1, 2), (0, 2)],
    }


def test_an_ellipsis_is_whole_dims():
    assert axes_of_dims(["a", "...", ["b", "c"]], 4, CUBE) == (("a",), (), (), ("b", "c"))
    assert axes_of_dims(["...", "a"], 1, CUBE) == (("a",),)
    assert axes_of_dims(["..."], 0, CUBE) == ()
    assert axes_of_dims([[], None], 2, CUBE) == ((), ())


@pytest.mark.parametrize(
    ("dims", "ndim", "sentence"),
    [
        (["a"], 2, "[a] does not fit a 2-dim tensor"),
        (["a", "...", "b"], 1, "[a, ..., b] does not fit a 1-dim tensor"),
        (["...", "..."], 2, "[..., ...]: only one entry can be ..."),
        (["a", None, "tp"], 3, "[a, null, tp]: axis 'tp' is not in mesh (a, b, c)"),
        (["a", ["b", "a"]], 2, "[a, [b, a]]: axis 'a' stands there twice"),
    ],
)
def test_dims_that_do_not_fit(dims, ndim, sentence):
    assert refusal(axes_of_dims, dims, ndim, list(CUBE)) == sentence


def test_a_part_that_is_not_even():
    assert (
        refusal(local_slices, (4, 6), [None, ["a", "b"]], MeshLayout(CUBE), 0)
        == "[null, [a, b]]: dim 1 of size 6 can not be split into 4"
    )


def device_matrix_slices(matrix, maps, shape, rank):
    """Return a rank's part as MindSpore has it: a row-major device matrix, axes of each dim."""
    at = []
    for size in reversed(matrix):
        rank, index = divmod(rank, size)
        at.insert(0, index)
    found = []
    for size, axis in zip(shape, maps, strict=True):
        parts, index = (1, 0) if axis is None else (matrix[axis], at[axis])
        found.append((size // parts * index, size // parts * (index + 1)))
    return found


POWERS = [(a, b, c) for a, b, c in itertools.product([1, 2, 4, 8], repeat=3) if a * b * c <= 8]


@pytest.mark.parametrize(("a", "b", "c"), POWERS)
def test_strategies_of_a_matrix_product(a, b, c):
    """Ranks hold what they hold in MindSpore, whose device matrix is (A, B, C, rest)."""
    layout = MeshLayout(CUBE)
    matrix = (a, b, c, 8 // (a * b * c))
    (x, y), out = strategy_dims([[a, b], [b, c]], MATMUL, CUBE)
    transposed, same = strategy_dims([[a, b], [c, b]], LINEAR, CUBE)

    for rank in range(8):
        for dims, maps in ((x, (0, 1)), (y, (1, 2)), (out, (0, 2)), (transposed[1], (2, 1))):
            found = numbers(local_slices((16, 8), dims, layout, rank))
            assert found == device_matrix_slices(matrix, maps, (16, 8), rank)
    assert (transposed[0], same) == (x, out)


def test_strategies_in_order():
    assert strategy_dims([[2, 4], [4, 1]], MATMUL, CUBE) == (
        [["a", ["b", "c"]], [["b", "c"], None]],
        ["a", None],
    )
    assert strategy_dims([[4, 1]], "...->...", CUBE) == ([[["a", "b"], None]], [["a", "b"], None])
    assert strategy_dims([[1, 2]], "...->...", {"one": 1, "a": 2}) == ([[None, "a"]], [None, "a"])


def test_a_batch_of_matrix_products():
    found = strategy_dims([[2, 1, 2, 1], [1, 1, 1, 2]], "...mk,...kn->...mn", CUBE)

    assert found == (
        [["a", None, "b", None], [None, None, None, "c"]],
        ["a", None, "b", "c"],
    )


def test_what_broadcasts_has_one_part_or_as_many():
    assert strategy_dims([[2, 4], [4]], "...,...->...", CUBE) == (
        [["a", ["b", "c"]], [["b", "c"]]],
        ["a", ["b", "c"]],
    )
    assert strategy_dims([[1, 4], [2, 1]], "...,...->...", CUBE) == (
        [[None, ["b", "c"]], ["a", None]],
        ["a", ["b", "c"]],
    )


def test_a_strategy_of_the_output():
    def out(*wanted):
        return strategy_dims([[2, 2], [2, 2]], MATMUL, CUBE, out_strategy=[wanted])[1]

    assert out(2, 2) == ["a", "c"]
    assert out(4, 2) == [["a", "b"], "c"]
    assert refusal(out, 2, 4) == "out_strategy ((2, 4),): the inputs give ((2, 2),) or ((4, 2),)"
    assert refusal(strategy_dims, [[2]], "...->...", CUBE, out_strategy=[[4]]) == (
        "out_strategy ((4,),): the inputs give ((2,),)"
    )


@pytest.mark.parametrize(
    ("strategy", "equation", "sentence"),
    [
        ([[2, 2]], MATMUL, "mk,kn->mn takes 2 of such entries, not 1"),
        ([[2, 2], [2]], MATMUL, "input 1 is kn, which takes other than 1 numbers"),
        ([[2, 2], [2, 2, 1]], LINEAR, "input 1 is nk, which takes other than 3 numbers"),
        ([[2, 0], [0, 1]], MATMUL, "0 is no number of parts"),
        ([[2, True], [1, 1]], MATMUL, "True is no number of parts"),
        (
            [[2, 4], [2, 1]],
            MATMUL,
            "dim 0 of input 1 has 2 parts and dim 1 of input 0 has 4, and both are k of mk,kn->mn",
        ),
        ([[4, 2], [2, 2]], MATMUL, "16 parts in all, and mesh (a 2, b 2, c 2) has 8 ranks"),
        (
            [[2, 3], [3, 1]],
            MATMUL,
            "no axes from b on make the 3 parts of dim 1 of input 0 in mesh (a 2, b 2, c 2)",
        ),
    ],
)
def test_strategies_that_do_not_fit(strategy, equation, sentence):
    shown = tuple(tuple(counts) for counts in strategy)

    assert refusal(strategy_dims, strategy, equation, CUBE) == f"strategy {shown}: {sentence}"


def test_axes_that_are_too_coarse():
    with pytest.raises(UsageError) as caught:
        strategy_dims([[4, 2], [2, 1]], MATMUL, {"dp": 2, "tp": 4})

    assert caught.value.message == (
        "strategy ((4, 2), (2, 1)): no axes from dp on make the 4 parts of dim 0 of input 0 "
        "in mesh (dp 2, tp 4)"
    )
    assert "2 x 2 x 2" in caught.value.hint


def test_shapes():
    shapes = [(32, 784), (784, 512)]

    assert strategy_dims([[2, 4], [4, 1]], MATMUL, CUBE, shapes=shapes)[1] == ["a", None]
    assert refusal(strategy_dims, [[2, 4], [4, 1]], MATMUL, CUBE, shapes=[(32, 6), (6, 2)]) == (
        "strategy ((2, 4), (4, 1)): dim 1 of input 0, of size 6, can not be split into 4 parts"
    )
    assert refusal(strategy_dims, [[2, 4], [4, 1]], MATMUL, CUBE, shapes=[(32,), (6, 2)]) == (
        "strategy ((2, 4), (4, 1)): input 0 is of shape [32]"
    )


@pytest.mark.parametrize(
    ("kind", "strategy", "params", "inputs", "out"),
    [
        (
            "Linear",
            [[2, 1], [4, 1]],
            {"weight": [["b", "c"], None], "bias": [["b", "c"]]},
            ["a", "...", None],
            ["a", "...", ["b", "c"]],
        ),
        (
            "Linear",
            [[1, 8], [1, 8]],
            {"weight": [None, ["a", "b", "c"]], "bias": [None]},
            ["...", ["a", "b", "c"]],
            ["...", None],
        ),
        (
            "Linear",
            [[2, 2, 1], [2, 1]],
            {"weight": ["c", None], "bias": ["c"]},
            ["a", "b", None],
            ["a", "b", "c"],
        ),
        ("Embedding", [[2, 1], [4, 1]], {"weight": ["a", None]}, [["b", "c"], None], None),
        ("GELU", [[2, 1, 4]], {}, ["a", None, ["b", "c"]], ["a", None, ["b", "c"]]),
    ],
)
def test_strategies_of_modules(kind, strategy, params, inputs, out):
    found = module_dims(kind, strategy, CUBE)

    assert (found.params, found.inputs) == (params, inputs)
    assert found.out == (out or [["b", "c"], None, None])


def test_a_module_that_has_one_input():
    assert refusal(module_dims, "Conv2d", [[2, 1], [1, 1]], CUBE) == (
        "strategy ((2, 1), (1, 1)): Conv2d takes one entry, for its input and its output"
    )


def layout(**changes):
    return Layout(
        **{"device_matrix": (2, 2, 2), "alias_name": ("dp", "sp", "mp"), "rank_list": None}
        | changes
    )


def test_a_layout_as_mindspore_prints_it():
    found = Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"), "None", ("None",))

    assert found.dims == ["mp", ["sp", "dp"], None, None]
    assert found.to_dict() == {
        "device_matrix": (2, 2, 2),
        "tensor_map": (0, (1, 2), -1, (-1,)),
        "interleaved_parallel": False,
        "alias_name": ("dp", "sp", "mp"),
        "rank_list": [0, 1, 2, 3, 4, 5, 6, 7],
    }


def test_a_layout_takes_what_yaml_has():
    found = layout()(["sp", "dp"], None)

    assert found.dims == [["sp", "dp"], None]
    assert found.to_dict()["tensor_map"] == ((1, 2), -1)


def test_aliases_stand_for_axes_of_the_mesh():
    tensor = Layout((2, 4), ("x", "y"), list(range(8)))("y", "x")

    assert tensor.on_mesh(CUBE) == [["b", "c"], "a"]
    assert Layout((2, 1, 4), ("x", "one", "y"))(("y", "one", "x")).on_mesh(CUBE) == [
        ["b", "c", "a"]
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("matrix", [(2, 2, 2), (1, 4, 2), (4, 1, 2)])
def test_a_layout_lies_as_its_device_matrix(matrix, order):
    names = ("x", "y", "z")
    dims = Layout(matrix, names)([names[index] for index in order]).on_mesh(CUBE)

    for rank in range(8):
        at = MeshLayout(dict(zip(names, matrix, strict=True))).coordinate(rank)
        index = 0
        for axis in order:
            index = index * matrix[axis] + at[names[axis]]
        assert numbers(local_slices((8,), dims, MeshLayout(CUBE), rank)) == [(index, index + 1)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device_matrix": [2, 2, 2]}, "device_matrix [2, 2, 2] is no tuple"),
        ({"alias_name": "dp"}, "alias_name 'dp' is no tuple"),
        ({"alias_name": ("dp",)}, "device_matrix has 3 axes and alias_name 1"),
        ({"device_matrix": (2, "2", 2)}, "device_matrix (2, '2', 2): '2' is no number of devices"),
        ({"device_matrix": (2, 0, 2)}, "device_matrix (2, 0, 2): 0 is no number of devices"),
        (
            {"alias_name": ("dp", "", "mp")},
            "alias_name ('dp', '', 'mp'): '' is no name of an axis",
        ),
        (
            {"alias_name": ("dp", "None", "mp")},
            "alias_name ('dp', 'None', 'mp'): 'None' is no name of an axis",
        ),
        ({"alias_name": ("dp", 1, "mp")}, "alias_name ('dp', 1, 'mp'): 1 is no name of an axis"),
        (
            {"alias_name": ("dp", "mp", "mp")},
            "alias_name ('dp', 'mp', 'mp'): 'mp' stands there twice",
        ),
        (
            {"alias_name": ("dp", "interleaved_parallel", "mp")},
            (
                "alias_name ('dp', 'interleaved_parallel', 'mp'): interleaved_parallel is the last "
                "of several"
            ),
        ),
        ({"rank_list": (0, 1)}, "rank_list (0, 1) is no list of ranks"),
        ({"rank_list": [0, "1"]}, "rank_list [0, '1'] is no list of ranks"),
        ({"rank_list": [0, 1]}, "rank_list has 2 ranks and device_matrix 8"),
        (
            {"rank_list": [0, 1, 2, 3, 4, 5, 6, 6]},
            "rank_list [0, 1, 2, 3, 4, 5, 6, 6]: a rank stands there twice",
        ),
    ],
)
def test_layouts_that_mindspore_refuses_too(changes, sentence):
    assert refusal(layout, **changes) == sentence


def test_entries_that_mindspore_refuses_too():
    assert refusal(layout(), "tp") == "alias 'tp' is not in alias_name (dp, sp, mp)"
    assert refusal(layout(), "dp", ("mp", "dp")) == "alias 'dp' cuts two dims, or one dim twice"


def test_layouts_that_are_not_the_mesh():
    def on(axes, *entries, **changes):
        return layout(**changes)(*entries).on_mesh(axes)

    assert refusal(on, {"dp": 2, "tp": 2}, "dp") == (
        "device_matrix (2, 2, 2) has 8 devices, and mesh (dp 2, tp 2) has 4 ranks"
    )
    assert refusal(on, {"x": 4, "y": 2}, "dp") == (
        "device_matrix (2, 2, 2): no axes from x on make the 2 parts of dp in mesh (x 4, y 2)"
    )
    assert refusal(on, {"mp": 2, "sp": 2, "dp": 2}, "dp") == (
        "device_matrix (2, 2, 2): alias dp stands for mesh axis mp"
    )
    assert refusal(on, CUBE, "dp", rank_list=[1, 0, 2, 3, 4, 5, 6, 7]) == (
        "rank_list [1, 0, 2, 3, 4, 5, 6, 7]: no order of the axes in mesh (a 2, b 2, c 2) gives "
        "these ranks"
    )
    assert refusal(on, CUBE, "dp", rank_list=[1, 2, 3, 4, 5, 6, 7, 8]) == (
        "rank_list [1, 2, 3, 4, 5, 6, 7, 8]: rank 8 is none of the 8 ranks"
    )


def test_a_list_of_ranks_is_of_a_part_of_the_mesh():
    mesh = MeshLayout({"x": 2, "dp": 2, "y": 2}, ranks=(0, 3, 4, 7, 1, 2, 5, 6))

    def on(ranks):
        cut = Layout((2, 2), ("a", "b"), ranks)
        return cut(("a", "b")).on_mesh({"x": 2, "y": 2}, mesh)

    assert on([0, 3, 1, 2]) == [["x", "y"]]
    assert on([4, 5, 7, 6]) == [["y", "x"]]
    assert refusal(on, [0, 1, 2, 3]) == (
        "rank_list [0, 1, 2, 3]: no order of the axes in mesh (x 2, y 2) gives these ranks"
    )
    assert refusal(on, [0, 3, 4, 7]) == (
        "rank_list [0, 3, 4, 7]: differ not only on x, y, as ranks [0, 3, 1, 2] do"
    )
