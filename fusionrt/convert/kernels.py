"""The kernels of a captured graph, compiled side by side.

Each would be compiled when it is first called, one after the other. At the first one that is missing
another thread rehearses the graph, which lists them, and compiles them as many at a time as there are
processors. Where none is missing nothing is rehearsed. What fails here is compiled at its first call.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fusionrt import rehearsal
from fusionrt.convert.effects import tensors, value
from fusionrt.convert.passes.checkpoints import checkpointed
from fusionrt.runtime import compiler, launch
from fusionrt.runtime import device as cuda

Run = Callable[..., Any]


def compiled_side_by_side(gm: GraphModule, run: Run, device: torch.device | None) -> Run:
    """`run`, in whose first call that is done. `device`: the one GPU that the graph is on, if it is so."""
    if device is None:
        return run
    called = False

    def watched(*args: Any) -> Any:
        nonlocal called
        if called:
            return run(*args)
        called = True
        with compiler.at_first_miss(lambda: _start(gm, device)):
            return run(*args)

    return watched


def _start(gm: GraphModule, device: torch.device) -> None:
    records = torch.is_grad_enabled()
    if not torch.is_autocast_enabled(device.type):  # whose casts a rehearsal does not see
        with contextlib.suppress(RuntimeError):  # no more threads
            threading.Thread(target=_compile, args=(gm, device, records), name="fusionrt-kernels").start()


def _compile(gm: GraphModule, device: torch.device, records: bool) -> None:
    with contextlib.suppress(Exception), torch.set_grad_enabled(records):
        arch = cuda.architecture(device.index)
        kernels = dict.fromkeys((compiler.seen_by(arch, text), entry, name)
                                for text, entry, name in needed(gm, device))
        with ThreadPoolExecutor(min(compiler.MAX_JOBS, os.cpu_count() or 1), "fusionrt-kernels") as pool:
            for text, entry, name in kernels:
                pool.submit(compiler.cubin, text, entry, compiler.target(entry, arch), name)


def needed(gm: GraphModule, device: torch.device) -> Iterator[rehearsal.Source]:
    """What a rewritten graph's calls compile on a GPU, in their order, and their gradients."""
    for n in gm.graph.nodes:
        if n.op == "call_function" and str(getattr(n.target, "__module__", "")).startswith("fusionrt"):
            with rehearsal.collecting(device) as found, contextlib.suppress(Exception):
                _rehearse(n)
            for kernel in found:
                yield from ([kernel] if isinstance(kernel, rehearsal.Source) else (
                    rehearsal.Source(made.text, made.entry, kernel.name) for made in launch.sources(kernel)))
    for _, body in checkpointed(gm):
        yield from needed(body, device)


def _rehearse(n: Node) -> None:
    """Call it on what was recorded for its operands: torch's own calls are not made, nor do they draw
    random numbers."""
    args, kwargs = map_arg((n.args, dict(n.kwargs)), lambda operand: _meta(value(operand)))
    target: Any = n.target
    out = target(*args, **kwargs)
    if isinstance(out, tuple):  # of some that are for the backward pass alone nobody asks a gradient
        used = {u.args[1] for u in n.users if u.target is operator.getitem}
        out = [t for k, t in enumerate(out) if k in used]
    recorded = [t for t in tensors(out) if t.requires_grad]
    if recorded:
        torch.autograd.backward(recorded, [torch.empty_like(t) for t in recorded])


def _meta(given: Any) -> Any:
    """The same on the meta device, of the sizes that were seen."""
    if isinstance(given, (tuple, list)):
        return type(given)(map(_meta, given))
    if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return given.node.hint
    if not isinstance(given, torch.Tensor):
        return given
    shape, strides = ([_meta(n) for n in sizes] for sizes in (given.shape, given.stride()))
    return torch.empty_strided(shape, strides, dtype=given.dtype, device="meta",
                               requires_grad=given.requires_grad)
