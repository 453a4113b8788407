"""Concatenations that begin as others do (a dense block's) are views of one tensor, into which each part is
copied once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fusionrt.convert.calls import appended
from fusionrt.convert.effects import Effect, value
from fusionrt.convert.graph import Edits, arguments, is_tensor
from fusionrt.ops.batch_norm import batch_norm

DEVICES = ("cuda",)  # on a CPU nothing was gained
_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


class Joined(NamedTuple):
    """A concatenation; `parts` with those of others among them in their places."""

    node: Node
    parts: list[Node]
    dim: int


def concatenations(edits: Edits) -> None:
    """Where no gradients are recorded. Last of the passes: none after it may move a call."""
    for chain in _chains(edits):
        if len(chain) > 1 and all(edits.allows(c.node) for c in chain):
            _join(edits, chain)


def _chains(edits: Edits) -> list[list[Joined]]:
    """Each concatenation with the next one that begins with its parts."""
    chains: list[list[Joined]] = []
    known: dict[Node, Joined] = {}
    for n in edits.nodes():
        found = _joined(edits, n, known)
        if found is None:
            continue
        known[n] = found
        for chain in chains:
            last = chain[-1]
            if (last.dim == found.dim and found.parts[:len(last.parts)] == last.parts
                    and edits.facts.region[last.node] == edits.facts.region[n]):
                chain.append(found)
                break
        else:
            chains.append([found])
    return chains


def _joined(edits: Edits, n: Node, known: dict[Node, Joined]) -> Joined | None:
    given = arguments(n, tensors=None, dim=0) if n.target in _CONCATENATIONS else None
    tensors: Any = given and given["tensors"]
    if not isinstance(tensors, (tuple, list)) or not is_tensor(n) or not all(map(is_tensor, tensors)):
        return None
    t, facts = value(n), edits.facts
    static = all(isinstance(size, int) for a in (n, *tensors) for size in value(a).shape)
    alike = all((value(a).dtype, value(a).device) == (t.dtype, t.device) and value(a).dim() == t.dim()
                for a in tensors)
    if (t.device.type not in DEVICES or not static or not alike or t.requires_grad
            or any(map(facts.is_written, (n, *tensors))) or not all(map(_takes_views, n.users))):
        return None
    dim: int = given["dim"] % t.dim() if given else 0
    return Joined(n, list(_flat(tensors, dim, known)), dim)


def _flat(tensors: Any, dim: int, known: dict[Node, Joined]) -> Iterator[Node]:
    for a in tensors:
        yield from known[a].parts if a in known and known[a].dim == dim else (a,)


def _takes_views(user: Node) -> bool:
    """Whether a call is as fast and gives the same of a tensor that is a part of a wider one: clusters, norms
    at inference, concatenations."""
    target = getattr(user.target, "func", user.target)  # of a functools.partial
    return (hasattr(target, "operator") or target in _CONCATENATIONS
            or (target is batch_norm and user.kwargs.get("training") is False))


def _join(edits: Edits, chain: list[Joined]) -> None:
    whole = value(chain[-1].node)
    made = edits.call(torch.empty_strided, (tuple(whole.shape), tuple(whole.stride())),
                      {"dtype": whole.dtype, "device": whole.device}, chain[0].node, given=whole)
    n_parts = start = 0
    for n, parts, dim in chain:
        view = edits.call(appended, (made, dim, start, *parts[n_parts:]), {}, n, effects=Effect((made,)))
        n_parts, start = len(parts), value(n).shape[dim]
        n.replace_all_uses_with(view)
        edits.note(n, None)
    edits.counts["concatenation"] += len(chain)
    edits.erase([n for n, _, _ in reversed(chain)])
