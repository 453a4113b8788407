"""What a pass over a row leaves to a later one."""

import torch

import fusionrt as frt
from fusionrt.expr import Expr
from fusionrt.rehearsal import collecting
from fusionrt.rowwise import schedule, with_sums
from fusionrt.runtime.carried import carried


def left_by_gradient_of(op, *shapes):
    """What the gradient's kernel carries, with the pass that leaves it."""
    args = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    out = op(*args)
    with collecting() as problems:
        torch.autograd.grad(out, args, torch.empty_like(out))
    roots = with_sums(next(p.roots for p in problems if p.row_dims))
    return carried(schedule(roots), roots)


def norm_and(epilogue):
    return lambda x, w, b: frt.layer_norm(x, (64,), w, b, epilogue=epilogue)


def test_the_gradient_of_an_activation_is_computed_once():
    for activation in (frt.gelu, frt.silu, frt.tanh):
        left = left_by_gradient_of(norm_and(activation), (32, 64), (64,), (64,))
        assert [*left.values()] == [0]
        assert not any(n.uniform for n in left)


def test_what_costs_little_is_computed_again():
    for activation in (None, frt.relu):
        assert not left_by_gradient_of(norm_and(activation), (32, 64), (64,), (64,))
    assert not left_by_gradient_of(frt.softmax, (32, 64))


def test_a_part_of_what_is_carried_is_not_carried_as_well():
    def op(x, w, b):
        return frt.layer_norm(x, (64,), w, b, epilogue=lambda y: frt.sigmoid(frt.exp(y)))

    left = left_by_gradient_of(op, (32, 64), (64,), (64,))
    operands = {a for n in left for a in n.args if isinstance(a, Expr)}
    assert len(left) == 1
    assert operands.isdisjoint(left)
