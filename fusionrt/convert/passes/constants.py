"""What depends on nothing but sizes (positions, causal masks) is computed once."""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fusionrt.convert.effects import NONE, Facts, tensors, value
from fusionrt.convert.graph import VALUE, Edits

CONSTANT = "fusionrt_constant"
LARGEST = 1 << 26  # bytes
_ORIGINS = ("arange", "zeros", "ones", "full", "tensor", "eye", "linspace", "zeros_like", "ones_like",
            "full_like", "new_zeros", "new_ones", "new_full")
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "poisson", "dropout", "alpha_dropout", "rrelu",
           "empty", "new_empty", "gumbel_softmax", "feature_", "fractional_", "native_dropout", "binomial",
           "scaled_dot_product_attention", "multi_head_attention_forward", "lstm", "gru", "rnn_")


def constants(edits: Edits) -> None:
    """Tensors that others read become attributes of the module; calls only between constants go."""
    facts = edits.facts
    known: dict[Node, Any] = {}
    for n in facts.nodes:
        found = _computed(n, known) if can_be_known(n, known, facts) else None
        if found is not None:
            known[n] = found
        elif _is_fill(n) and not known.keys().isdisjoint(m for c in facts.classes[n.args[0]]
                                                         for m in facts.members[c]):
            return  # as should not be: what it leaves unfilled is not to be taken for known
    read = [n for n in known if isinstance(known[n], torch.Tensor) and any(u not in known for u in n.users)]
    if any(map(_is_fill, known)) and not all(map(edits.allows, read)):
        return  # fills stay or go with what they fill
    for n in filter(edits.allows, read):
        edits.note(n, None)
        n.replace_all_uses_with(hold(edits, n, known[n], value(n)))
    edits.erase(list(known))


def can_be_known(n: Node, known: Container[Node], facts: Facts) -> bool:
    """Whether it follows from the known values alone, and is no more than what may be kept."""
    name = _name(n)
    if _is_fill(n):
        return n.args[0] in known
    if (n.op not in ("call_function", "call_method") or name.startswith(_RANDOM) or facts.effects[n] != NONE
            or torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) or _escapes(n, facts)):
        return False
    operands = [a for a in n.all_input_nodes if a not in known]
    if name in _ORIGINS and (name.endswith("_like") or name.startswith("new_")):
        like = n.args[0] if n.args else n.kwargs.get("input")  # asked for size and dtype only
        operands = [a for a in operands if a is not like]
    if operands or not (n.all_input_nodes or name in _ORIGINS):
        return False
    found = list(tensors(value(n)))
    return bool(found) and all(
        not t.requires_grad and all(isinstance(size, int) for size in (*t.shape, *t.stride()))
        and t.numel() * t.itemsize <= LARGEST for t in found)


def _name(n: Node) -> str:
    return str(n.target if n.op == "call_method" else getattr(n.target, "__name__", ""))


def _is_fill(n: Node) -> bool:
    """Writing numbers to known places."""
    return n.target is operator.setitem and n.all_input_nodes == [n.args[0]]


def _escapes(n: Node, facts: Facts) -> bool:
    """Whether somebody could write to it what is not known, or reads it while it is written to."""
    classes = set(facts.classes[n])
    if facts.is_written(n):
        fills = [m for m in facts.nodes for t in facts.effects[m].writes
                 if not classes.isdisjoint(facts.classes[t])]
        last = max(map(facts.position.__getitem__, fills))
        readers = {u for c in classes for m in facts.members[c] for u in m.users} - set(fills)
        if not all(map(_is_fill, fills)) or any(
                facts.position[u] < last and not classes & set(facts.classes[u]) for u in readers):
            return True
    return any(u.op == "output" or facts.effects[u].barrier
               for c in facts.classes[n] for m in facts.members[c] for u in m.users)


def _computed(n: Node, known: dict[Node, Any]) -> Any:
    """Its value, if that is what Dynamo has found it to be."""
    target: Any = n.target
    stand_in = _empty if _name(n).startswith("new_") else _like
    try:
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = map_arg((n.args, dict(n.kwargs)),
                                   lambda a: known[a] if a in known else stand_in(value(a)))
            if n.op == "call_method":
                target, args = getattr(args[0], target), args[1:]
            found = target(*args, **kwargs)
            if _is_fill(n):
                return args[0]
    except Exception:  # of whatever the call is: it is then left where it was
        return None
    kinds = [[(type(t) is torch.Tensor, t.shape, t.dtype, t.device, t.stride()) for t in tensors(of)]
             for of in (found, value(n))]
    return found if [(True, *kind[1:]) for kind in kinds[1]] == kinds[0] else None


def _like(fake: torch.Tensor) -> torch.Tensor:
    """A tensor of that size, of which nothing else is asked."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _empty(fake: torch.Tensor) -> torch.Tensor:
    """One of no size, which may vary."""
    return torch.empty(0, dtype=fake.dtype, device=fake.device)


def hold(edits: Edits, at: Node, tensor: torch.Tensor, fake: torch.Tensor) -> Node:
    """The tensor as an attribute of the module, read before `at`."""
    name = f"_constant_{sum(a.startswith('_constant_') for a in vars(edits.gm))}"
    setattr(edits.gm, name, tensor)
    with edits.graph.inserting_before(at):
        made = edits.graph.create_node("get_attr", name)
    made.meta.update({VALUE: fake, CONSTANT: tensor})
    edits.facts.add(made, at)
    return made
