"""What an operator computes: expressions, and the expressions of its derivatives.

Gradients are operators again: the same expressions differentiated, with every gradient of a broadcast operand
summed to that operand's shape. That class is closed under differentiation, so second and higher derivatives
need nothing more.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from fusionrt.derivatives import UNGRADED, gradients, through_output
from fusionrt.expr import Expr, argument
from fusionrt.graph import emit, leaves, substitute, toposort
from fusionrt.layout import Ints
from fusionrt.properties import kept_property
from fusionrt.rowwise import schedule

if TYPE_CHECKING:
    from fusionrt.op import Operator

SCALAR = "scalar"
Target = int | str | None


class Definition:
    """`outputs` are expressions over `a0`, `a1`, ..., or what gives them when they are first asked for.
    Output k is summed to the shape of argument `targets[k]` and takes its dtype, or has the promoted dtype
    and the full shape (None) or none (SCALAR). Arguments `uniform` have one value a row, where there are
    rows."""

    def __init__(self, name: str, params: Sequence[str],
                 outputs: Sequence[Expr] | Callable[[], Sequence[Expr]],
                 targets: Sequence[Target] | None = None, uniform: Collection[int] = ()) -> None:
        self.name, self.params = name, tuple(params)
        self._outputs, self._targets = outputs, targets
        self.uniform = frozenset(uniform)
        self.order: Ints | None = None  # of dimensions: see `Operator.walking`
        self.saved: tuple[int, ...] = ()  # of a gradient: which outputs are among its arguments
        self._gradients: dict[tuple[bool, ...], Operator] = {}
        self._behind: dict[tuple[bool, ...], frozenset[int]] = {}
        self._reads: dict[tuple[bool, ...], tuple[tuple[bool, ...], tuple[int, ...]]] = {}

    @kept_property
    def outputs(self) -> tuple[Expr, ...]:
        return tuple(self._outputs() if callable(self._outputs) else self._outputs)

    @kept_property
    def targets(self) -> tuple[Target, ...]:
        return tuple(self._targets) if self._targets else (None,) * len(self.outputs)

    @kept_property
    def used(self) -> frozenset[str]:
        """Arguments that outputs are computed from."""
        return frozenset(leaves(self.outputs, "arg"))

    @kept_property
    def flags(self) -> frozenset[str]:
        """Arguments that have to be bool."""
        flags = {n.args[0] for n in toposort(self.outputs) if n.op == "flag"}
        return frozenset(str(a.args[0]) for a in flags if isinstance(a, Expr) and a.op == "arg")

    @kept_property
    def streams(self) -> tuple[str, ...]:
        """What an element takes from beside its arguments, by its place in the walk."""
        return tuple(dict.fromkeys([*leaves(self.outputs, "random"), *leaves(self.outputs, "mask")]))

    traits: tuple[Any, ...] = ()  # what else decides what is computed

    @kept_property
    def digest(self) -> str:
        """Of what is computed; two operators of one name may differ."""
        text = repr((emit(self.outputs, "{} = {}"), self.targets, sorted(self.uniform), self.traits,
                     self.order))
        return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()

    def gradient(self, needed: tuple[bool, ...], given: tuple[bool, ...],
                 wanted: tuple[bool, ...] | None = None) -> Operator:
        """The operator of the backward pass: arguments are this one's, those of its outputs that shorten
        the work (`saved`), and the `given` gradients of its outputs; results the gradients of the `needed`
        arguments, each in that one's shape, or of some `wanted` ones of them: what is saved stays."""
        wanted = wanted or needed
        key = (*needed, *given, *wanted)
        if key not in self._gradients:
            positions = [k for k, is_given in enumerate(given) if is_given]
            grads = {k: argument(f"grad{k}", self.targets[k] in self.uniform if isinstance(
                self.targets[k], int) else self.outputs[k].uniform) for k in positions}
            seeds: dict[Expr, Expr] = {}
            for k, grad in grads.items():
                out = self.outputs[k]
                seeds[out] = seeds[out] + grad if out in seeds else grad
            wrt = [i for i in range(len(self.params)) if needed[i]]
            roots = gradients(seeds, [argument(f"a{i}", i in self.uniform) for i in wrt])
            roots, saved = self._through_outputs(roots)
            # Saved outputs stand before the gradients: results have the layout of the first full argument.
            more = [*saved.values(), *grads.values()]
            place = dict(zip(more, itertools.count(len(self.params)), strict=False))
            roots = substitute(roots, {a: argument(f"a{at}", a.uniform) for a, at in place.items()})
            roots = [root for root, i in zip(roots, wrt, strict=True) if wanted[i]]
            names = [f"output{k}" if len(self.outputs) > 1 else "output" for k in saved]
            names += [f"grad_output{k}" if len(given) > 1 else "grad_output" for k in positions]
            flags = "".join(str(int(flag)) for flag in (*wanted, *given))
            made = self.derived(f"{self.name}_backward_{flags}", [*self.params, *names], roots,
                                [i for i in wrt if wanted[i]],
                                {*self.uniform, *(at for a, at in place.items() if a.uniform)})
            made.saved = tuple(saved)
            self._gradients[key] = made
        return self._gradients[key]

    def derived(self, *definition: Any) -> Operator:
        """An operator of the same kind."""
        raise NotImplementedError

    def _through_outputs(self, roots: list[Expr]) -> tuple[list[Expr], dict[int, Expr]]:
        """The gradients by means of outputs: of the small ones that they need, of a full one that others
        are computed from (a sum with a residual), and of the only one if that saves reading arguments
        (relu(a + b)) or passes over the rows (softmax)."""
        free = {k: out for k, out in enumerate(self.outputs)
                if self.targets[k] is None and out.op not in ("arg", "const")}
        names = {k: argument(f"out{k}", out.uniform) for k, out in free.items()}
        inner = {a for out in self.outputs for n in toposort([out]) for a in n.args}
        roots = substitute(roots, {out: names[k] for k, out in free.items() if out.uniform or out in inner})
        if len(self.outputs) == 1 and 0 in free:
            found = substitute(roots, through_output(free[0], names[0]))
            # At the same cost too, as torch's activations do: the next layer keeps its input anyway.
            roots = found if _work(found) <= _work(roots) else roots
        used = set(leaves(roots, "arg"))
        return roots, {k: name for k, name in names.items() if f"out{k}" in used}

    @kept_property
    def shared(self) -> list[tuple[int, list[int]]]:
        """Of a gradient operator: targets whose gradient equals, shapes permitting, an argument (an
        incoming gradient) or the gradient of an earlier target."""
        found = []
        for k, (root, target) in enumerate(zip(self.outputs, self.targets, strict=True)):
            candidates = [int(str(root.args[0])[1:])] if root.op == "arg" else []
            candidates += [t for t, other in zip(self.targets[:k], self.outputs, strict=False)
                           if other is root and isinstance(t, int)]
            if candidates and isinstance(target, int):
                found.append((target, candidates))
        return found

    def read_by_backward(self, needed: tuple[bool, ...]) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Which arguments' values the gradients of the needed ones depend on, and which outputs'."""
        if needed not in self._reads:
            n, any_gradient = len(self.params), any(self.differentiable) and any(needed)
            gradient = self.gradient(needed, self.differentiable) if any_gradient else None
            used = gradient.used if gradient is not None else frozenset()
            self._reads[needed] = (tuple(f"a{i}" in used for i in range(n)),
                                   gradient.saved if gradient is not None else ())
        return self._reads[needed]

    def behind(self, given: tuple[bool, ...]) -> frozenset[int]:
        """The arguments that these outputs are computed from, otherwise than by comparing them."""
        if given not in self._behind:
            # A mask has no gradient, and none in `given`.
            roots = [root for root, is_given in zip(self.outputs, given, strict=False) if is_given]
            self._behind[given] = frozenset(int(str(n.args[0]).removeprefix("a"))
                                            for n in toposort(roots, UNGRADED) if n.op == "arg")
        return self._behind[given]

    def graded(self, needed: tuple[bool, ...]) -> list[bool]:
        """Which outputs require a gradient, as torch's: those that follow from a needed argument."""
        wanted = {i for i, need in enumerate(needed) if need}
        places = range(len(self.differentiable))
        return [is_graded and not wanted.isdisjoint(self.behind(tuple(j == k for j in places)))
                for k, is_graded in enumerate(self.differentiable)]

    @kept_property
    def differentiable(self) -> tuple[bool, ...]:
        """Which outputs have a gradient: not truth values, not integers."""
        return tuple(root not in UNGRADED for root in self.outputs)


def _work(roots: Sequence[Expr]) -> tuple[int, int]:
    """What a kernel of these outputs costs first of all: the arguments it reads, the passes it takes."""
    return len(leaves(roots, "arg")), len(schedule(roots))
