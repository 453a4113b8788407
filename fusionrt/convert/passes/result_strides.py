"""What calls of ours give may lie otherwise in memory than torch's: attention as its kernels leave it, norms
as their image. Results of a graph are put back, and views that only torch's have may copy."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.calls import batch_first_attention, self_attention, with_strides
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, called, is_tensor
from fusionrt.convert.kept_masks import attention_by_kept_mask
from fusionrt.convert.match import named, rule_of
from fusionrt.ops.attention import attention

_OURS = (attention, attention_by_kept_mask, batch_first_attention, self_attention)
# Of images they keep the memory format, which need not be the one that values had when the graph was traced.
_OF_IMAGES = frozenset([
    torch.cat, torch.pixel_shuffle, torch.pixel_unshuffle, getattr(torch._C._nn, "pad", F.pad), F.pad,
    F.interpolate, F.group_norm, F.instance_norm, F.batch_norm,
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d])
_NORMS = ("fusionrt.ops.norm", "fusionrt.ops.batch_norm", "fusionrt.ops.softmax")


def result_strides(edits: Edits) -> None:
    """Results of attention and norms, and of what is computed of these element by element, that share no
    memory with others; views of these are left."""
    _let_views_copy(edits)
    otherwise: set[Node] = set()  # may lie so
    for n in edits.nodes():
        follows = not otherwise.isdisjoint(n.all_input_nodes)
        if called(n) in _OURS or _module(n) in _NORMS or (follows and _lies_as_its_operands(n)):
            otherwise.add(n)
    output = next(n for n in edits.nodes() if n.op == "output")
    for n in output.all_input_nodes:
        if n in otherwise and is_tensor(n) and edits.allows(n):
            _put_back(edits, n, output)


def _lies_as_its_operands(n: Node) -> bool:
    """A call of elements, a part of several results, or what keeps the format of images."""
    part = n.target is operator.getitem and not is_tensor(n.args[0])
    return (part or rule_of(n) is not None or hasattr(n.target, "operator") or called(n) in _OF_IMAGES
            or _module(n).startswith("fusionrt.ops.conv"))


def _put_back(edits: Edits, n: Node, user: Node) -> None:
    t = value(n)
    if all(isinstance(size, int) for size in (*t.shape, *t.stride())):
        user.replace_input_with(n, edits.call(with_strides, (n, t.stride()), {}, user, given=t))
    elif t.is_contiguous():
        user.replace_input_with(n, edits.call(torch.Tensor.contiguous, (n,), {}, user, given=t))


def _let_views_copy(edits: Edits) -> None:
    """Where nobody writes to them."""
    found: set[Node] = set()  # what follows from calls of ours
    for n in edits.nodes():
        if found.isdisjoint(n.all_input_nodes):
            if _module(n).startswith("fusionrt"):
                found.add(n)
            continue
        found.add(n)
        if not edits.allows(n) or edits.facts.is_written(n):
            continue
        if named(n, "as_strided") and is_tensor(n.args[0]):
            _put_back(edits, n.args[0], n)  # type: ignore[arg-type]
        if n.op == "call_method" and n.target == "view" and not n.kwargs and not any(
                isinstance(a, torch.dtype) for a in n.args):
            n.target = "reshape"


def _module(n: Node) -> str:
    return str(getattr(called(n), "__module__", ""))
