"""Values of a graph again, after some of them have come to lie in memory otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from fusionrt.convert.effects import effect, tensors, value
from fusionrt.convert.graph import VALUE, Edits, same
from fusionrt.convert.match import named


def revalue(edits: Edits, changed: Mapping[Node, Any]) -> bool:
    """Compute with fake tensors what follows from the changed nodes, as far as that makes a difference.

    `changed`: with the values that they, or what stood in their place, had before. Results of the graph are
    put back to where torch's would lie. False, and all values are those from before, where a call cannot take
    its operands so (a view that would need a copy).
    """
    different = set(changed)
    before = dict(changed)
    for n in list(edits.graph.nodes):
        operands = [a for a in n.all_input_nodes if a in different]
        if not operands:
            continue
        if n.op == "output" and _put_back(edits, n, before):
            continue
        found = _of_call(n, before)
        if found is None or not _alike(value(n), found):
            for old, its in before.items():
                old.meta[VALUE] = its
            return False
        if not _is_fresh(n, found) or not _lies_alike(value(n), found):
            before[n] = value(n)
            n.meta[VALUE] = found
            different.add(n)
    edits.changed()
    return True


def take_place(edits: Edits, n: Node, made: Node) -> None:
    """Let others read `made` instead of n, whose memory is another; where that cannot be, a copy of it."""
    its, lies = value(n), value(made)
    n.replace_all_uses_with(made)
    if not revalue(edits, {made: its}):
        made.meta[VALUE] = lies
        users = list(made.users)
        copied = edits.call(torch.Tensor.contiguous, (made,), {}, n, given=its)
        for u in users:
            u.replace_input_with(made, copied)


def _put_back(edits: Edits, output: Node, before: dict[Node, Any]) -> bool:
    """Whether all of the graph's results lie as before, those that lay in the usual order by a copy; of what
    shared its memory there is none."""
    results = {a: before.get(a, value(a)) for a in output.all_input_nodes}
    shared = Counter(memory for old in results.values() for memory in _memory(old))
    moved = {a: old for a, old in results.items() if a in before and not _lies_alike(old, value(a))}
    if not all(isinstance(old, torch.Tensor) and old.is_contiguous()
               and all(shared[m] == 1 for m in _memory(old)) for old in moved.values()):
        return False
    for a, old in moved.items():
        with edits.graph.inserting_before(output):
            copy = edits.graph.call_method("contiguous", (a,))
        copy.meta[VALUE] = old
        output.replace_input_with(a, copy)
    return True


def _of_call(n: Node, before: Mapping[Node, Any]) -> Any:
    """None where that fails, for whatever reason the call has."""
    if n.op not in ("call_function", "call_method") or _knows_memory(n):
        return None
    name: Any = n.target
    target = name if n.op == "call_function" else lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    try:
        image = n.args[:1] if _lies_as_its_image(n) else (n,) if _lies_as_it_did(n, before) else None
        found = computed(target, n.args, n.kwargs) if image is None else computed(torch.empty_like, image, {})
    except Exception:  # of any operator: a view that there is not of these strides, a dtype, a shape
        return None
    for new, old in zip(tensors(found), tensors(value(n)), strict=False):
        if old.requires_grad and new.is_floating_point():
            new.requires_grad_()
    return found


def _knows_memory(n: Node) -> bool:
    """Whether what it gives depends on where its operands' elements lie; of calls that are not torch's nobody
    can tell."""
    return named(n, "as_strided", "as_strided_") or effect(n).barrier or isinstance(
        n.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _lies_as_its_image(n: Node) -> bool:
    """Of a batch norm, which fake tensors decompose into dozens of calls: 3 ms."""
    image = value(n.args[0]) if n.target is F.batch_norm and n.args else None
    return isinstance(image, torch.Tensor) and image.dim() == 4 and (
        image.is_contiguous() or image.is_contiguous(memory_format=torch.channels_last))


def _lies_as_it_did(n: Node, before: Mapping[Node, Any]) -> bool:
    """Of an attention, whose result follows the order of its operands' dimensions; fake tensors decompose it
    as well: 8 ms."""
    return n.target is F.scaled_dot_product_attention and all(
        _order(before.get(a, value(a))) == _order(value(a)) is not None for a in n.all_input_nodes)


def _order(t: Any) -> list[int] | None:
    """A tensor's dimensions as they lie in memory; None where sizes vary."""
    if not isinstance(t, torch.Tensor) or not all(isinstance(step, int) for step in t.stride()):
        return None
    return sorted(range(t.dim()), key=t.stride)


def computed(target: Any, args: Any, kwargs: Any) -> Any:
    """What a call of a function, or the method of that name, gives with these nodes among its arguments;
    raises what the call raises."""
    operands: list[Node] = []
    map_arg((args, dict(kwargs)), operands.append)
    modes = [t.fake_mode for t in tensors([value(a) for a in operands]) if hasattr(t, "fake_mode")]
    with modes[0], torch.no_grad():
        args, kwargs = map_arg((args, dict(kwargs)), value)
        return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(
            *args, **kwargs)


def _alike(old: Any, new: Any) -> bool:
    """But for strides."""
    pairs = list(zip(tensors(old), tensors(new), strict=False))
    return len(pairs) == len(list(tensors(old))) == len(list(tensors(new))) > 0 and all(
        same(a.shape, b.shape)
        and (a.dtype, a.device, a.requires_grad) == (b.dtype, b.device, b.requires_grad) for a, b in pairs)


def _lies_alike(old: Any, new: Any) -> bool:
    return all(same(a.stride(), b.stride()) for a, b in zip(tensors(old), tensors(new), strict=True))


def _is_fresh(n: Node, found: Any) -> bool:
    return _memory([value(a) for a in n.all_input_nodes]).isdisjoint(_memory(found))


def _memory(found: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors(found)}
