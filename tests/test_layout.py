"""Geometry, against NumPy's and torch's and against counting element by element."""

import math
import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusionrt as frt
from fusionrt import layout
from fusionrt.expr import argument
from fusionrt.problem import Problem
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch, pointwise, vectors
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.parts import split
from fusionrt.runtime.source import Field, Params, definitions, device_function, magic, members, pointer

fast = settings(max_examples=100, deadline=None, derandomize=True)
SIZES = st.integers(1, 4)
SHAPES = st.lists(SIZES, max_size=5).map(tuple)


@st.composite
def operands(draw):
    """A domain, the order in which it is walked, and tensors that broadcast over it."""
    shape = draw(SHAPES)
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        kept = shape[draw(st.integers(0, len(shape))) :]
        own = [draw(st.sampled_from([n, 1])) for n in kept]
        storage = torch.arange(math.prod(own) * 3 + 50)
        order = draw(st.permutations(range(len(own))))
        t = (
            storage[: math.prod(own)]
            .view([own[d] for d in order])
            .permute([order.index(d) for d in range(len(own))])
        )
        if own and draw(st.booleans()):  # with gaps
            t = (
                storage.as_strided(
                    own, [2 * s + 1 if n > 1 else s for n, s in zip(own, t.stride(), strict=True)]
                )
                if math.prod(own) < 12
                else t
            )
        tensors.append(t)
    return shape, list(draw(st.permutations(range(len(shape))))), tensors


def walked(shape, order):
    """Coordinates of the domain's elements, the first of `order` fastest."""
    sizes = [shape[d] for d in order]
    for flat in range(math.prod(shape)):
        c = [0] * len(shape)
        for d, n in zip(order, sizes, strict=True):
            flat, c[d] = divmod(flat, n)
        yield c


def offsets(sizes, strides):
    for flat in range(math.prod(sizes)):
        at = 0
        for n, s in zip(sizes, strides, strict=True):
            flat, c = divmod(flat, n)
            at += c * s
        yield at


@fast
@given(operands())
def test_collapsed_walk_visits_the_same_elements(case):
    shape, order, tensors = case
    over = [layout.expand_strides(t.shape, t.stride(), shape) for t in tensors]
    order = [d for d in order if shape[d] != 1]
    domain = layout.collapse(shape, order, over)
    assert domain.numel == math.prod(shape)
    for t, strides in zip(tensors, domain.strides, strict=True):
        full = t.expand(shape)
        expected = [
            sum(i * s for i, s in zip(c, full.stride(), strict=True))
            for c in walked(shape, order + [d for d in range(len(shape)) if d not in order])
        ]
        assert list(offsets(domain.sizes, strides)) == expected
    for d in range(1, len(domain.sizes)):  # neighbours that could be merged are
        assert any(s[d] != s[d - 1] * domain.sizes[d - 1] for s in domain.strides)


@fast
@given(operands())
def test_memory_order_walks_a_dense_tensor_in_steps_of_one(case):
    shape, order, _ = case
    dense = torch.empty([shape[d] for d in order]).permute(
        [order.index(d) for d in range(len(shape))]
    )
    strides = dense.stride()
    found = layout.memory_order(shape, strides)
    domain = layout.collapse(shape, found, [strides])
    assert domain.sizes == (math.prod(shape),)
    assert domain.strides[0] in ((1,), (0,))
    assert layout.collapse(shape, found, [tuple(strides)]).flat == (1,)


@fast
@given(operands())
def test_reduced_strides_number_the_sums(case):
    """Every element of a reduced tensor has one place, and these are 0, 1, 2, ... as walked."""
    shape, order, tensors = case
    order = [d for d in order if shape[d] != 1]
    for t in tensors:
        strides = layout.reduced_strides(t.shape, shape, order)
        places = np.zeros(shape, np.int64)
        for d, s in enumerate(strides):
            places += (
                np.arange(shape[d]).reshape([-1 if k == d else 1 for k in range(len(shape))]) * s
            )
        index = np.broadcast_to(np.arange(t.numel()).reshape(t.shape), shape)
        of_place = {}
        for place, i in zip(places.ravel(), index.ravel(), strict=True):
            assert of_place.setdefault(place, i) == i
        assert sorted(of_place) == list(range(t.numel()))
        seen = list(
            dict.fromkeys(
                int(places[tuple(c)])
                for c in walked(shape, order + [d for d in range(len(shape)) if d not in order])
            )
        )
        assert seen == sorted(seen)


@fast
@given(operands(), st.randoms())
def test_reduction_splits_the_domain(case, random):
    shape, order, tensors = case
    over = [layout.expand_strides(t.shape, t.stride(), shape) for t in tensors]
    domain = layout.collapse(shape, [d for d in order if shape[d] != 1], over)
    kept = [random.random() < 0.5 for _ in domain.sizes]
    r = layout.reduction(domain, kept)
    assert r.n_groups * r.n_rows * r.columns == domain.numel
    assert r.kept == math.prod(n for n, keep in zip(domain.sizes, kept, strict=True) if keep)
    groups, rows = (
        list(offsets([n for n, _ in dims], [step for _, step in dims]))
        for dims in (r.groups, r.rows)
    )
    elements = [g + row + c for g in groups for row in rows for c in range(r.columns)]
    assert sorted(elements) == list(range(domain.numel))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), max_size=4))
def test_what_is_said_to_lie_apart_does(dims):
    shape, strides = zip(*dims, strict=True) if dims else ((), ())
    places = {sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*shape)}
    if layout.lie_apart(shape, strides):
        assert len(places) == math.prod(shape)
    x = torch.empty(3, 4, 5, 6)
    for dense in (x, x.permute(2, 0, 3, 1), x[::2, :, 1:], x[:, :1], torch.empty(())):
        assert layout.lie_apart(dense.shape, dense.stride())
    for shared in (x[:1].expand(2, -1, -1, -1), x.unfold(-1, 3, 1)):
        assert not layout.lie_apart(shared.shape, shared.stride())


@fast
@given(st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), min_size=1, max_size=4))
def test_broadcast_shapes(shapes):
    try:
        expected = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        expected = None
    assert layout.broadcast_shapes(shapes) == expected


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    st.integers(1, 2**31 - 1) | st.integers(1, 5000) | st.integers(0, 30).map(lambda k: 2**k),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
)
def test_magic_division(divisor, n, k):
    value, multiplier, shift = magic(divisor)
    assert value == divisor
    assert multiplier < 2**32
    assert shift < 32
    for m in (
        n,
        0,
        divisor - 1,
        divisor,
        2**31 - 1,
        (k % (2**31 // divisor)) * divisor,
        max((k % (2**31 // divisor)) * divisor - 1, 0),
    ):
        high = m * multiplier >> 32
        assert high + m < 2**32  # the sum is one of 32 bits
        assert (high + m) >> shift == m // divisor


# --- parameters -----------------------------------------------------------------------------------

C_SIZES = {
    "unsigned long long": 8,
    "double": 8,
    "WideDivisor": 8,
    "Divisor": 12,
    "unsigned": 4,
    "float": 4,
}


def c_layout(declaration):
    """Offsets of a struct's members and its size, as a C++ compiler lays it out."""
    at, offsets, largest = 0, [], 1
    for line in declaration.splitlines()[1:-1]:
        kind = line.strip().rsplit(" ", 1)[0]
        size = 8 if "*" in kind else C_SIZES[kind]
        alignment = 4 if kind == "Divisor" else size
        at = -(-at // alignment) * alignment
        offsets.append(at)
        at, largest = at + size, max(largest, alignment)
    return offsets, at, -(-at // largest) * largest


@fast
@given(st.lists(st.integers(0, 4), max_size=8))
def test_params_have_no_padding(kinds):
    kinds = [
        [
            pointer("float32_t", "p"),
            Field("unsigned long long n", "Q"),
            Field("double x", "d"),
            Field("Divisor d", "III"),
            Field("float x", "f"),
        ][k]
        for k in sorted(kinds)
    ]
    params = Params(kinds)
    found, _, size = c_layout(params.declaration)
    expected = [
        struct.calcsize("=" + "".join(f.format for f in kinds[:k])) for k in range(len(kinds))
    ]
    assert found == expected
    assert size == params.packer.size


def test_params_refuse_a_field_that_would_be_padded():
    with pytest.raises(AssertionError, match="fields must not grow in size"):
        Params([Field("float x", "f"), pointer("float32_t", "p")])


def test_what_a_plan_knows_is_given_by_name():
    kernel = Kernel("copied", "transpose", [
        pointer("float", "x"), Field("long long folds[2]", "qq"), *members("int", "rows", "columns"),
        *members("Divisor", "by")])
    assert [field.name for field in kernel.fields] == ["x", "folds", "rows", "columns", "by"]
    assert kernel.planned(by=3, columns=5, rows=-7) == (-7, 5, *magic(3))
    assert kernel.planned(by=3, columns=5, rows=-7, folds=[9]) == (9, 0, -7, 5, *magic(3))
    for values in ({"by": 3, "rows": 7}, {"by": 3, "row": 7, "columns": 5},
                  dict.fromkeys(("a", "b", "c", "d", "e", "f"), 1)):
        names = ", ".join(["x", "folds", "rows", "columns", "by"][-len(values):])
        with pytest.raises(TypeError, match=re.escape(
                f"copied: the last {len(values)} fields of transpose are {names}, got {', '.join(values)}")):
            kernel.planned(**values)


def test_a_prologues_constants_have_the_types_of_their_values():
    assert definitions(scalar_t="float16_t", VEC=8, TABLES=True, SHIFT=-1, KIND="STAGED") == [
        "using scalar_t = float16_t;", "constexpr int VEC = 8;", "constexpr bool TABLES = true;",
        "constexpr int SHIFT = -1;", "constexpr auto KIND = STAGED;"]


def test_an_expression_is_a_function_of_named_parameters():
    a, b = argument("a0"), argument("b")
    assert device_function("acc_t finish(acc_t product, acc_t b)", a * b + 1, {a: "product"}) == [
        "__device__ __forceinline__ acc_t finish(acc_t product, acc_t b) {",
        "    const auto t0 = product * b;", "    const auto t1 = t0 + acc_t(1.0);", "    return t1;", "}"]


META_CALLS = [
    lambda new: frt.gelu(new(33, 17)),
    lambda new: frt.leaky_relu(new(33, 17), 0.1),
    lambda new: frt.bias_gelu(new(33, 17), new(17)),
    lambda new: frt.gelu_dropout(new(33, 17), 0.1),
    lambda new: frt.add_mul_add(new(33, 1), new(1, 17), new(), new(5, 1, 1)),
    lambda new: frt.add_relu(new(17, 33).t(), new(33, 17)[:, :1]),
    lambda new: frt.add_relu(new(2**16, 2**16), new(2**16)),
    lambda new: frt.add_relu(new(2**17, 2**15).t(), new(2**17)),
]


@pytest.mark.parametrize("call", META_CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_params_of_real_problems_have_no_padding(call, dtype):
    def new(*shape):
        return torch.empty(shape, dtype=dtype, device="meta").requires_grad_()

    with collecting() as problems:
        out = call(new)
        out.backward(torch.empty_like(out))
    assert len(problems) == 2
    for problem in problems:
        assert isinstance(problem, Problem)
        for part, _, rows in split(problem):
            for alignment in (2, 8, 16):
                source = pointwise.generate(part, alignment, rows)
                found, _, size = c_layout(source.params.declaration)
                assert size == source.params.packer.size, source.params.declaration
                assert len(found) == len(source.values)
                assert sum(map(len, source.values)) == len(source.params.packer.unpack(bytes(size)))


# --- what is generated for a layout ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shapes", "width", "modes"),
    [
        (torch.bfloat16, [(64, 32), (32,)], 8, ["flat", "vector"]),
        (torch.bfloat16, [(64, 32), (64, 1)], 8, ["flat", "splat"]),
        (torch.bfloat16, [(64, 32), ()], 8, ["flat", "scalar"]),
        (torch.bfloat16, [(33, 17), (17,)], 8, ["flat", "gather"]),
        (torch.float32, [(64, 32), (64, 32)], 4, ["flat", "flat"]),
        (torch.float64, [(3, 5), (3, 5)], 2, ["flat", "flat"]),
    ],
)
def test_how_operands_are_read(dtype, shapes, width, modes):
    with collecting() as problems:
        frt.add_relu(*(torch.empty(s, dtype=dtype, device="meta") for s in shapes))
    (problem,) = problems
    found = vectors.vector_width(problem, 16)
    assert found == width
    assert [pointwise.access_mode(o, problem.sizes, found) for o in problem.inputs] == modes


@pytest.mark.parametrize(
    ("op", "dtype", "rows", "grid"),
    [
        (frt.gelu, torch.bfloat16, 1 << 12, ("pointwise", 2048, 128)),
        (frt.gelu, torch.bfloat16, 384, ("pointwise_of_few", 768, 256)),
        (frt.gelu, torch.float32, 255, ("pointwise_of_few", 510, 256)),
        (frt.add_relu, torch.bfloat16, 384, ("pointwise_of_few", 768, 256)),
        (frt.add_relu, torch.bfloat16, 385, ("pointwise", 385, 128)),
        (frt.add_relu, torch.float64, 256, ("pointwise", 1024, 128)),  # is of two elements a thread as it is
    ],
)
def test_few_elements_are_given_to_more_threads(op, dtype, rows, grid):
    with collecting() as problems:
        op(*(torch.empty(rows, 1024, dtype=dtype, device="meta") for _ in op.example(lambda *_: None)))
    (problem,) = problems
    assert pointwise.grid(problem, vectors.vector_width(problem, 16)) == grid
    (source,) = launch.sources(problem)  # one translation unit for any size
    assert ("#define EACH_OF_FEW 2" in source.text) == (dtype != torch.float64)


def test_collapsed_dimensions():
    def sizes(*tensors):
        with collecting() as problems:
            frt.add_relu(*tensors)
        return problems[0].sizes

    def new(*shape):
        return torch.empty(shape, device="meta")

    assert sizes(new(4, 5, 6), new(4, 5, 6)) == (120,)
    assert sizes(new(4, 5, 6), new(6)) == (6, 20)
    assert sizes(new(4, 5, 6), new(5, 6)) == (30, 4)
    assert sizes(new(4, 5, 6), new(4, 1, 1)) == (30, 4)
    assert sizes(new(4, 5, 6), new(5, 1)) == (6, 5, 4)
    images = new(2, 6, 4, 5).to(memory_format=torch.channels_last)
    assert sizes(images, images) == (240,)
    assert sizes(images, new(6, 1, 1)) == (6, 40)
    assert sizes(new(1, 1), new()) == (1,)
