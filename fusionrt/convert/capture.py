"""The backend of torch.compile: a captured graph in, a function with fewer kernels out.

Dynamo hands over the torch functions that a model called, with parameters and buffers as inputs. Passes
rewrite that graph into fusionrt's ops, which are differentiable by themselves: what is left is ordinary
Python, run as it is, in training as well. Repeated shapes are replays of CUDA graphs.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.operator_schemas import get_signature_for_torch_op

from fusionrt.convert.aliases import guarded
from fusionrt.convert.effects import Facts, as_recorded, tensors
from fusionrt.convert.graph import VALUE, Edits, value
from fusionrt.convert.kernels import compiled_side_by_side
from fusionrt.convert.passes import PASSES
from fusionrt.convert.passes.checkpoints import checkpointed
from fusionrt.convert.replay import device_of_graph, replayed
from fusionrt.convert.training import trained
from fusionrt.watching import PLAIN, is_transformed, is_wrapped

Run = Callable[..., Any]


class Found(NamedTuple):
    """What was done to one graph. `counts` by statistic ("norm", "pointwise_cluster", ...); `replacements`
    are keys for `Options.excluded`; `graph_before` and `graph_after`: how many calls the graph makes."""

    counts: dict[str, int]
    replacements: list[str]
    graph_before: int
    graph_after: int


class Options(NamedTuple):
    """`passes`: names, in the order in which they run. `excluded`: keys of replacements to leave out, as
    Found gives them. `on_graph` hears of every graph that was rewritten. `fresh_outputs`: without it what a
    replayed CUDA graph returns is overwritten by its next replay. `graphs_kept`: CUDA graphs alive of one
    captured graph and one model's weights, one for each kind of inputs."""

    passes: tuple[str, ...] = tuple(PASSES)
    excluded: frozenset[str] = frozenset()
    cuda_graphs: bool = True
    on_graph: Callable[[Found], None] | None = None
    fresh_outputs: bool = True
    graphs_kept: int = 8


DEFAULT = Options()
_MODES = {None: True, "default": True, "reduce-overhead": True, "max-autotune": True,
          "max-autotune-no-cudagraphs": False}


def rewrite(gm: GraphModule, options: Options = DEFAULT) -> Found:
    """Run the passes on a graph that Dynamo captured, in place. Of the graph only what depends on sizes alone
    is computed, and only small tensors."""
    edits = Edits(gm, options.excluded)
    before = edits.calls
    for name in options.passes:
        if name not in PASSES:
            raise ValueError(f"rewrite: no pass is called {name!r}; known are {', '.join(PASSES)}")
        edits.run(name, PASSES[name])
    gm.recompile()
    parts = [Found(dict(edits.counts), edits.replacements, before, edits.calls),
             *(rewrite(body, options) for _, body in checkpointed(gm))]
    return Found(dict(sum((Counter(part.counts) for part in parts), Counter())),
                 [key for part in parts for key in part.replacements],
                 sum(part.graph_before for part in parts), sum(part.graph_after for part in parts))


def backend(gm: GraphModule, example_inputs: Sequence[Any], *, options: Options | Mapping[str, Any] = DEFAULT,
            mode: str | None = None) -> Run:
    """What Dynamo calls with each graph: `torch.compile(model, backend="fusionrt")`.

    `options`: Options, or a dict of some of its fields, as torch.compile(options=...) passes it. `mode`: one
    of torch's; "max-autotune-no-cudagraphs" is cuda_graphs=False. Raises ValueError or TypeError for others.
    """
    if mode not in _MODES:
        raise ValueError(f"fusionrt: mode must be one of {', '.join(m for m in _MODES if m)}, got {mode!r}")
    unknown = [] if isinstance(options, Options) else sorted(options.keys() - set(Options._fields))
    if unknown:
        raise TypeError(f"fusionrt: no option {unknown[0]!r}; there are {', '.join(Options._fields)}")
    chosen = options if isinstance(options, Options) else Options(**options)
    chosen = chosen._replace(cuda_graphs=chosen.cuda_graphs and _MODES[mode])
    _correct_powers(gm)
    if not _is_plain(gm, example_inputs):
        if chosen.on_graph is not None:
            calls = Edits(gm, chosen.excluded).calls
            chosen.on_graph(Found({}, [], calls, calls))
        return gm.forward
    _correct_views(gm)
    _correct_places(gm)
    mutated = _mutated_inputs(gm)
    original = _copy(gm) if mutated else None
    found = rewrite(gm, chosen)
    if chosen.on_graph is not None:
        chosen.on_graph(found)
    run = compiled_side_by_side(gm, gm.forward, device_of_graph(gm))
    if chosen.cuda_graphs:
        run = (trained(gm, run, mutated) if _records(gm) else
               replayed(gm, run, mutated, chosen.fresh_outputs, chosen.graphs_kept))
    return run if original is None else guarded(run, original.forward, mutated)


def _copy(gm: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def _is_plain(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether all inputs are ordinary tensors and numbers, and no transform of torch.func is within, nor
    forward-mode differentiation about. Other tensors keep torch's own calls: what they make of ours nobody
    knows."""
    if is_transformed() or any(map(is_wrapped, (t for n in gm.graph.nodes for t in tensors(value(n))))):
        return False
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return len(inputs) == len(example_inputs) and all(
        not isinstance(given, torch.Tensor)
        or (type(given) in PLAIN and given.layout == torch.strided and isinstance(value(n), torch.Tensor))
        for n, given in zip(inputs, example_inputs, strict=True)
    )


def _records(gm: GraphModule) -> bool:
    """Whether its results have gradients."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    return any(t.requires_grad for n in output.all_input_nodes for t in tensors(value(n)))


def _correct_powers(gm: GraphModule) -> None:
    """(-1) ** x, which fx writes as -1 ** x."""
    for part in gm.modules():
        powers = [n for n in part.graph.nodes if n.target is operator.pow and _is_negative(n.args[0])
                  ] if isinstance(part, GraphModule) else []
        for n in powers:
            n.target = pow
        if powers:
            part.recompile()  # type: ignore[operator]


def _is_negative(number: Any) -> bool:
    return isinstance(number, (int, float)) and math.copysign(1, number) < 0


def _correct_views(gm: GraphModule) -> None:
    for n in gm.graph.nodes:
        if n.op.startswith("call") and VALUE in n.meta:
            n.meta[VALUE] = as_recorded(value(n))


def _correct_places(gm: GraphModule) -> None:
    """Operands that a model gives by name stand first, where passes look for them: torch.cat(tensors=...)."""
    for part in gm.modules():
        for n in part.graph.nodes if isinstance(part, GraphModule) else ():
            first = _first_parameter(n) if n.op == "call_function" and n.kwargs and not n.args else None
            if first is not None:
                n.args = (n.kwargs[first],)
                n.kwargs = {name: given for name, given in n.kwargs.items() if name != first}


def _first_parameter(n: Node) -> str | None:
    """The name of it, of the overload that has all that is given; None where nobody can tell."""
    target: Any = n.target
    try:
        overloads: Any = get_signature_for_torch_op(target) or [inspect.signature(target)]
    except (TypeError, ValueError):  # builtin, and not torch's
        return None
    fitting = (s.parameters for s in overloads if n.kwargs.keys() <= s.parameters.keys())
    first = next(iter(next(fitting, ())), None)
    return first if first in n.kwargs else None


def _mutated_inputs(gm: GraphModule) -> list[int]:
    """Places of the inputs that the graph writes to, or may."""
    facts = Facts(gm.graph)
    inputs: list[Node] = [n for n in facts.nodes if n.op == "placeholder"]
    return [k for k, n in enumerate(inputs) if facts.is_written(n)]
