"""One op of the catalogue in one dtype at one size: its inputs, calls on them, its least traffic."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusionrt.bench import traffic
from fusionrt.bench.timing import Call
from fusionrt.catalogue import COLUMNS, OPS, ROWS

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"


class Case:
    """`sets` input sets of random normal numbers (or random integers), on `device`.

    The op's example is written for matrices of ROWS × COLUMNS; here they have `columns` columns (fewer if
    `elements` is less) and as many rows as make `elements`, which is then what they really have. Of an
    example otherwise (images, heads) `elements` is what its first argument has, and where that is no matter
    of rows either, it has one size (`scales`). Raises KeyError for an op or a dtype that does not exist.

        case = Case("bias_gelu", "bfloat16", 1 << 20, "cuda")
        call, = case.calls(case.op, BACKWARD)
    """

    def __init__(self, op: str, dtype: str, elements: int, device: str, sets: int = 1,
                 columns: int = COLUMNS) -> None:
        self.op, self.name, self.dtype, self.device = OPS[op], op, DTYPES[dtype], device
        self.columns = max(1, min(columns, elements))
        self.rows = max(1, elements // self.columns)
        self._met: set[int] = set()
        self.inputs = [self.op.example(self._make) for _ in range(sets)]
        self.scales = ROWS in self._met
        self.elements = (self.rows * self.columns if self.scales and COLUMNS in self._met else
                         _tensors(self.inputs[0])[0].numel())
        takes_dtype = "dtype" in inspect.signature(self.op).parameters
        self.keywords = {"dtype": self.dtype} if takes_dtype else {}
        self._traffic: dict[str, int] = {}

    def _make(self, *shape: int, dtype: torch.dtype | None = None, high: int | None = None,
              device: str | None = None) -> torch.Tensor:
        """`high`: integers below it, such as class numbers below the number of columns."""
        sizes, device = {ROWS: self.rows, COLUMNS: self.columns}, device or self.device
        self._met.update(shape)
        shape, dtype = tuple(sizes.get(n, n) for n in shape), dtype or self.dtype
        if dtype.is_floating_point:
            return torch.randn(shape, device=device).to(dtype)
        low, high = (-128, 128) if high is None else (0, sizes.get(high, high))
        return torch.randint(low, high, shape, device=device).to(dtype)

    @functools.cached_property
    def _graded(self) -> list[bool]:
        """The arguments whose gradients are asked for: not integers, nor what the example detaches."""
        def make(*shape: int, **kind: Any) -> torch.Tensor:
            made = self._make(*shape, device="meta", **kind)
            return made.requires_grad_() if made.is_floating_point() else made

        return [isinstance(a, torch.Tensor) and a.requires_grad for a in self.op.example(make)]

    def _recording(self, args: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """The arguments of a call that is recorded, and those among them whose gradients are asked for."""
        leaves = [a.detach().requires_grad_() if graded else a
                  for a, graded in zip(args, self._graded, strict=True)]
        return leaves, [a for a, graded in zip(leaves, self._graded, strict=True) if graded]

    # -- calls -------------------------------------------------------------------------------------

    def calls(self, function: Callable[..., Any], direction: str, n: int = 1, overwrites: bool = False
              ) -> list[Call]:
        """n calls of a function with the op's signature, on the input sets in rotation; on copies of them
        if it `overwrites` what it is given."""
        made = [self._call(function, _copied(args) if overwrites else args, direction)
                for args in self.inputs]
        return [made[i % len(made)] for i in range(n)]

    def _call(self, function: Callable[..., Any], args: Sequence[Any], direction: str) -> Call:
        called = functools.partial(function, **self.keywords)
        if direction == FORWARD:
            return functools.partial(called, *args)
        leaves, wanted = self._recording(args)
        out = called(*leaves)
        seeds = self._seeds[:len(_differentiable(out))]
        if direction == BACKWARD:
            return functools.partial(torch.autograd.grad, _differentiable(out), wanted, seeds,
                                     retain_graph=True)
        if isinstance(out, torch.Tensor):  # nothing besides that the host would have to do
            return lambda: torch.autograd.grad(called(*leaves), wanted, seeds[0])
        return lambda: torch.autograd.grad(_differentiable(called(*leaves)), wanted, seeds)

    @functools.cached_property
    def _seeds(self) -> list[torch.Tensor]:
        """Of the backward passes. One for all sets: what is read with it is read anew."""
        return [torch.randn_like(o) for o in _differentiable(self._recorded())]

    # -- facts -------------------------------------------------------------------------------------

    @functools.cached_property
    def differentiable(self) -> bool:
        return bool(_differentiable(self._recorded()))

    def _recorded(self) -> Any:
        return self.op(*self._recording(self.inputs[0])[0], **self.keywords)

    def traffic(self, direction: str) -> int:
        """Bytes: every input once, every output once. A backward pass reads the gradients of the outputs
        and what the op saved, and writes every gradient that is a tensor of its own: a residual's is
        the incoming one, those of two summands are one."""
        if direction == BOTH:
            return self.traffic(FORWARD) + self.traffic(BACKWARD)
        if direction not in self._traffic:
            measure = self._forward_traffic if direction == FORWARD else self._backward_traffic
            self._traffic[direction] = measure()
        return self._traffic[direction]

    def _forward_traffic(self) -> int:
        out = self.op(*self.inputs[0], **self.keywords)
        return traffic.least_bytes(self.inputs[0], out)

    def _backward_traffic(self) -> int:
        saved: dict[tuple[int, int], int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
            return tensor

        leaves, wanted = self._recording(self.inputs[0])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = _differentiable(self.op(*leaves, **self.keywords))
        grads = torch.autograd.grad(outputs, wanted, self._seeds)
        own = {g.data_ptr(): g.nbytes for g in grads}
        for seed in self._seeds:
            own.pop(seed.data_ptr(), None)
        return sum(saved.values()) + sum(seed.nbytes for seed in self._seeds) + sum(own.values())


def least_bytes(op: str, dtype: str, elements: int, columns: int = COLUMNS) -> int:
    """Of a forward pass; meta tensors compute nothing."""
    small = Case(op, dtype, min(elements, 64 * columns), "meta", columns=columns)
    return small.traffic(FORWARD) * (max(1, elements // small.columns) if small.scales else small.rows
                                     ) // small.rows


def _tensors(values: Any) -> list[torch.Tensor]:
    """Of a result or of arguments: a tensor, or a tuple with some in it."""
    return [v for v in (values if isinstance(values, (tuple, list)) else (values,))
            if isinstance(v, torch.Tensor)]


def _differentiable(out: Any) -> list[torch.Tensor]:
    return [o for o in _tensors(out) if o.requires_grad]


def _copied(args: Sequence[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
