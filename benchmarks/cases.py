"""One op in one dtype at one size: its inputs, our calls and the peers', its least traffic."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config

import fusionrt.ops  # noqa: F401  (fills the catalogue)
from benchmarks.timing import Call
from fusionrt.catalogue import COLUMNS, OPS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
OURS, EAGER, COMPILE = "fusionrt", "eager", "torch.compile"
# A compiled backward pass may otherwise overwrite what it was given, and run only once.
torch._functorch.config.donated_buffer = False


class Case:
    """`sets` input sets of random normal numbers (random integers where an op takes int8)."""

    def __init__(self, op: str, dtype: str, elements: int, device: str, sets: int = 1,
                 columns: int = COLUMNS) -> None:
        self.op, self.name, self.dtype = OPS[op], op, DTYPES[dtype]
        self.rows, self.columns, self.device = max(1, elements // columns), columns, device
        self.elements = self.rows * columns
        self.inputs = [self.op.example(self._make) for _ in range(sets)]
        takes_dtype = "dtype" in inspect.signature(self.op).parameters
        self.keywords = {"dtype": self.dtype} if takes_dtype else {}

    def _make(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Examples are matrices of ROWS × COLUMNS, rows of COLUMNS, and single elements."""
        if shape:
            shape = (self.rows, self.columns) if len(shape) == 2 else (self.columns,)
        if dtype is torch.int8:
            return torch.randint(-128, 128, shape, dtype=dtype, device=self.device)
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    # -- functions ---------------------------------------------------------------------------------

    def function(self, variant: str) -> Callable[..., Any]:
        called = {OURS: self.op, EAGER: self.op.reference, COMPILE: self._compiled}[variant]
        return functools.partial(called, **self.keywords)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        # All references share one code object, of which Dynamo compiles eight versions and no more.
        torch._dynamo.reset()
        return torch.compile(self.op.reference, dynamic=False, fullgraph=True)

    def calls(self, variant: str, direction: str, n: int = 1) -> list[Call]:
        """n calls, on the input sets in rotation."""
        function = self.function(variant)
        made = [self._call(function, args, direction) for args in self.inputs]
        return [made[i % len(made)] for i in range(n)]

    def _call(self, function: Callable[..., Any], args: Sequence[Any], direction: str) -> Call:
        if direction == FORWARD:
            return functools.partial(function, *args)
        leaves = [a.detach().requires_grad_() if _is_float(a) else a for a in args]
        wanted = [a for a in leaves if _is_float(a)]
        if direction == BACKWARD:
            out = function(*leaves)
            return functools.partial(torch.autograd.grad, out, wanted, self._seed,
                                     retain_graph=True)
        return lambda: torch.autograd.grad(function(*leaves), wanted, self._seed)

    @functools.cached_property
    def _seed(self) -> torch.Tensor:
        """Of the backward passes. One for all sets: what is read with it is read anew."""
        return torch.randn_like(self.op(*self.inputs[0], **self.keywords))

    # -- facts -------------------------------------------------------------------------------------

    @functools.cached_property
    def differentiable(self) -> bool:
        return bool(self._recorded().requires_grad)

    def _recorded(self) -> torch.Tensor:
        args = [a.detach().requires_grad_() if _is_float(a) else a for a in self.inputs[0]]
        return self.op(*args, **self.keywords)

    @functools.cached_property
    def traffic(self) -> dict[str, int]:
        """Bytes: every input once, every output once. A backward pass reads the gradient and those
        arguments that the derivative depends on, and writes every gradient that is a tensor of its
        own: a residual's is the incoming one, those of two summands are one."""
        args = [a for a in self.inputs[0] if isinstance(a, torch.Tensor)]
        out = self.op(*self.inputs[0], **self.keywords)
        found = {FORWARD: sum(a.nbytes for a in args) + out.nbytes}
        if self.differentiable:
            recorded = self._recorded()  # kept alive: with it go the tensors that it saved
            reads = sum(saved.nbytes for saved in recorded.grad_fn.saved_tensors)
            written = zip((a for a in args if _is_float(a)), self._written(), strict=True)
            found[BACKWARD] = reads + out.nbytes + sum(a.nbytes for a, own in written if own)
            found[BOTH] = found[FORWARD] + found[BACKWARD]
        return found

    def _written(self) -> list[bool]:
        """Whether each argument's gradient is a tensor of its own, seen on small ones on the CPU."""
        def small(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.randn([{0: 2, 1: 3}[i] if len(shape) == 2 else 3 for i in range(len(shape))])

        args = [a.requires_grad_() if _is_float(a) else a for a in self.op.example(small)]
        out = self.op(*args, **self.keywords)
        seed = torch.randn_like(out)
        grads = torch.autograd.grad(out, [a for a in args if _is_float(a)], seed)
        seen = [seed.data_ptr()]
        return [not (g.data_ptr() in seen or seen.append(g.data_ptr())) for g in grads]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def least_bytes(op: str, dtype: str, elements: int) -> int:
    """Of a forward pass; meta tensors compute nothing."""
    small = Case(op, dtype, 64 * COLUMNS, "meta")
    return small.traffic[FORWARD] * elements // small.elements


def ratios(times: dict[str, Any], traffic: int) -> dict[str, Any]:
    """A row's figures: our time, its spread, our rate, how many times as long the others take."""
    ours = times[OURS]
    found = {"us": ours.us, "spread": ours.spread, "TB/s": round(traffic / ours.us / 1e6, 4)}
    for name, key in ((EAGER, "eager"), (COMPILE, "compile")):
        if name in times:
            found |= {f"{key}_us": times[name].us, f"vs_{key}": round(times[name].us / ours.us, 3)}
    return found


def why(error: Exception) -> str:
    """An error as one short line of a result file: the first of those that led to each other."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]
