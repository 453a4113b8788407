"""Which way an attention takes: a kernel of torch's (cuDNN's, flash, efficient), our own Hopper's, or chunks.

By architecture, dtype, widths, lengths and what is asked for beside softmax(q k^T) v; decided once for each
kind of call. On Hopper and data-centre Blackwell cuDNN's kernels have twice the rate of the flash kernels,
which torch's default may prefer. torch's kernels are called as ATen ops: `sdpa_kernel`, the context manager,
costs more than a small attention and changes the choice of all threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fusionrt import autocast
from fusionrt.dtypes import HALVES
from fusionrt.guards import Check, both
from fusionrt.ops.attention_chunks import Options, attention_in_chunks, of_dtype
from fusionrt.ops.attention_hopper import hopper_attention
from fusionrt.ops.attention_kernels import CAPABILITY, DIMS
from fusionrt.ops.attention_masked import laid_out, masked_attention, regular
from fusionrt.rehearsal import device_type
from fusionrt.sites import Sites
from fusionrt.watching import is_watched, seen_by_torch, transforms_active

Tensor = torch.Tensor
_C = torch._C  # torch's public functions of these names take three times as long
PREFER_CUDNN = (9, 10)     # major architectures: those of torch's own preference
# Keys from which on our Hopper kernel is faster than cuDNN's: benchmarks/attention.py.
LONG, LONG_NARROW_CAUSAL = 4096, 8192
# Keys up to which torch's efficient kernels gain more in the gradient than they lose before it.
SHORT_NARROW_CAUSAL = 128
# Up to 9.15.0 cuDNN reads beyond sequences that do not end with a tile.
CUDNN_OF_ANY_LENGTH, CUDNN_TILE = 91501, 128
_KEPT = 4096


class Kind(NamedTuple):
    """What decides about a call."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool           # query i attends to keys up to i
    band: bool             # bounded in another way
    masked: bool
    ours: bool             # asks for what no fused kernel has
    dropout_p: float
    recorded: bool         # a gradient is wanted
    scored: bool = False   # softcap or ALiBi, which torch's kernels lack
    positive: bool = True  # the scale; by others torch's kernels multiply the -inf of what is left out


# -- the choice ------------------------------------------------------------------------------------

def candidates(kind: Kind, capability: tuple[int, int], cudnn: int) -> list[str]:
    """Ways for a GPU, the fastest first; the last one can do everything."""
    if kind.ours or kind.dtype == torch.float64 or not kind.positive:
        return ["chunks"]
    preferred = ["cudnn"] if capability[0] in PREFER_CUDNN else []
    ways = ["hopper", *preferred, "flash", "efficient"]
    if capability == CAPABILITY and _is_short(kind):
        ways.insert(0, "efficient")
    return [*dict.fromkeys(way for way in ways if _can[way](kind, capability, cudnn)), "chunks"]


def _is_square(kind: Kind) -> bool:
    """Of others the causal kernels do not agree which corner the diagonal begins in."""
    return not kind.causal or kind.queries == kind.keys


def _is_short(kind: Kind) -> bool:
    return kind.recorded and kind.causal and kind.head_dim == 64 and kind.keys <= SHORT_NARROW_CAUSAL


def _is_special(kind: Kind) -> bool:
    """Whether cuDNN's kernels lack what is asked for."""
    return kind.scored or kind.band or not _is_square(kind)


def _hopper_can(kind: Kind, capability: tuple[int, int], cudnn: int) -> bool:
    # Of what cuDNN has as well it is faster, by 2 to 19 %, where sequences are long; but for gradients.
    long = LONG_NARROW_CAUSAL if kind.causal and kind.head_dim == 64 else LONG
    is_long = kind.queries >= long and kind.keys >= long
    widths = kind.head_dim == kind.value_dim and kind.head_dim in DIMS
    return (capability == CAPABILITY and kind.dtype in HALVES and widths
            and (_is_special(kind) or (is_long and not kind.recorded)) and not kind.masked
            and not kind.dropout_p)


def _cudnn_can(kind: Kind, capability: tuple[int, int], cudnn: int) -> bool:
    tiles = kind.queries % CUDNN_TILE == 0 and kind.keys % CUDNN_TILE == 0
    # Gradients of single queries (cuDNN 9.26), and those with a mask where half a tile of keys is left
    # (9.20), may be NaN: others take these.
    lengths = kind.queries > 1 and kind.keys > 1 and (
        tiles or (cudnn >= CUDNN_OF_ANY_LENGTH and not (kind.masked and kind.recorded)))
    widths = kind.head_dim % 8 == 0 and kind.value_dim % 8 == 0
    return (kind.dtype in HALVES and not kind.band and not kind.scored and _is_square(kind) and lengths
            and widths and kind.dropout_p * 16 % 1 == 0)


def _flash_can(kind: Kind, capability: tuple[int, int], cudnn: int) -> bool:
    # Gradients of wide heads need more shared memory than other architectures have.
    wide = kind.head_dim > 192 and kind.recorded and capability not in ((8, 0), (9, 0), (10, 0), (10, 3))
    widths = kind.head_dim == kind.value_dim and kind.head_dim <= 256 and not wide
    return (kind.dtype in HALVES and capability[0] >= 8 and not kind.masked and not kind.scored
            and _is_square(kind) and widths)


def _efficient_can(kind: Kind, capability: tuple[int, int], cudnn: int) -> bool:
    aligned = 8 if kind.dtype in HALVES else 4
    return (not kind.band and not kind.scored and (kind.dtype != torch.bfloat16 or capability[0] >= 8)
            and kind.head_dim % aligned == 0 and kind.value_dim % aligned == 0)


_can: dict[str, Callable[[Kind, tuple[int, int], int], bool]] = {
    "cudnn": _cudnn_can, "hopper": _hopper_can, "flash": _flash_can, "efficient": _efficient_can}


def _torch_agrees(way: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout_p: float) -> bool:
    """Which also depends on its version and on what the user has disabled."""
    if way in ("hopper", "chunks"):  # ours
        return True
    cuda = torch.backends.cuda
    can_use = {"cudnn": cuda.can_use_cudnn_attention, "flash": cuda.can_use_flash_attention,
               "efficient": cuda.can_use_efficient_attention}[way]
    if way == "efficient":  # which takes keys and values with as many heads as there are of queries
        k, v = (t if t.shape[1] == q.shape[1] else t[:, :1].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    grouped = k.shape[1] != q.shape[1]
    return bool(can_use(cuda.SDPAParams(q, k, v, None, dropout_p, causal, grouped)))


def _of_user() -> tuple[bool, bool, bool]:
    """Whether cuDNN's kernels, flash and efficient ones are enabled."""
    return (_C._get_cudnn_sdp_enabled() and not _C._get_deterministic_algorithms(),
            _C._get_flash_sdp_enabled(), _C._get_mem_efficient_sdp_enabled())


def _machine(index: int | None) -> tuple[tuple[int, int], int, tuple[str, ...]]:
    """The architecture, the version of cuDNN, and the ways that the user has disabled."""
    enabled = zip(("cudnn", "flash", "efficient"), _of_user(), strict=True)
    return (*_hardware(index), tuple(way for way, is_on in enabled if not is_on))


# Dynamo evaluates it while it traces. `torch.compiler.assume_constant_result` would import Dynamo.
_machine._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _hardware(index: int | None) -> tuple[tuple[int, int], int]:
    return torch.cuda.get_device_capability(index), torch.backends.cudnn.version() or 0


_chosen: dict[Any, str] = {}


def chosen(q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> str:
    """The way of a call on a GPU."""
    capability, cudnn, disabled = _machine(q.device.index)
    if "cudnn" in disabled and not _is_special(kind):  # in whose place ours would stand
        disabled = (*disabled, "hopper")
    if is_watched():  # of symbolic sizes no key is made; torch's own checks cannot be traced
        ways = [way for way in candidates(kind, capability, cudnn) if way not in disabled]
        return ways[1] if ways[0] == "cudnn" and kind.head_dim > 128 else ways[0]
    key = kind, q.device, q.shape[0], q.stride(), k.stride(), v.stride(), disabled
    way = _chosen.get(key)
    if way is None:
        if len(_chosen) >= _KEPT:
            _chosen.clear()
        way = _chosen[key] = next(
            way for way in candidates(kind, capability, cudnn)
            if way not in disabled and _torch_agrees(way, q, k, v, kind.causal, kind.dropout_p))
    return way


# -- calls -----------------------------------------------------------------------------------------

Run = Callable[..., Tensor]    # of q, k, v, a mask and slopes
sites = Sites()                # by the options; of calls without a mask and slopes


def nothing_attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The result where operands are empty: without keys zeros, with their gradients."""
    k, v = (_as_many_heads(t, q) for t in (k, v))
    scores = q @ k.mT
    if mask is not None and mask.requires_grad:
        scores = scores + mask.to(scores.dtype)
    return scores @ v


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None, options: Options,
           key: tuple[Any, ...] | None = None) -> Tensor:
    """As `attention_in_chunks`, by the way that suits best. `key`: of the options, for `sites`."""
    given = q, k, v
    if not q.numel() or not v.numel():
        return nothing_attended(q, k, v, mask)
    if options.causal and k.shape[2] > q.shape[2]:  # nobody attends to the others
        k, v = (t.narrow(2, 0, q.shape[2]) for t in (k, v))
        mask = mask if mask is None or mask.shape[3] == 1 else mask.narrow(3, 0, q.shape[2])
    if q.is_cuda:
        q, k, v = (regular(t) for t in (q, k, v))
    way, kind = way_of(q, k, v, mask, slopes, options)
    run = _ways[way](options, kind)
    is_same = q is given[0] and k is given[1] and v is given[2]
    if key is not None and mask is None and slopes is None and is_same and not seen_by_torch(q, k, v):
        return sites.keep(key, given, run, _as_now(q.device))(*given)
    return run(q, k, v, mask, slopes)


def _as_now(device: torch.device) -> Check:
    """Whether operands are aligned, and all that is no tensor's still decides the same."""
    user, casting = _of_user(), autocast.casting_as_now(device)

    def check(q: Tensor, k: Tensor, v: Tensor) -> bool:
        return _of_user() == user and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15

    return check if casting is None else both(check, casting)


def way_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None, options: Options
           ) -> tuple[str, Kind]:
    """The name of the way, and what decided it."""
    kind = _kind_of(q, k, v, mask, slopes, options)
    if q.is_cuda:
        return chosen(q, k, v, kind), kind
    rehearsed = kind.dtype == torch.float64 and device_type(q) == "cuda"  # a meta tensor
    special = (kind.ours or kind.scored or kind.band or kind.dropout_p or not kind.positive
               or (kind.causal and kind.masked))
    chunked = special or rehearsed or kind.head_dim != kind.value_dim
    return "chunks" if chunked else "torch", kind


def _kind_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None, options: Options
             ) -> Kind:
    graded = torch.is_grad_enabled()
    recorded = transforms_active() or (graded and (q.requires_grad or k.requires_grad or v.requires_grad))
    ours = options.chunk > 0 or (mask is not None and graded and mask.requires_grad)
    causal = options.causal
    band = (options.left >= 0 or options.right >= 0) and not causal
    return Kind(q.dtype, heads=q.shape[1], kv_heads=k.shape[1], queries=q.shape[2], keys=k.shape[2],
                head_dim=q.shape[3], value_dim=v.shape[3], causal=causal, band=band, masked=mask is not None,
                ours=ours, dropout_p=options.dropout_p, recorded=recorded,
                scored=slopes is not None or options.softcap > 0, positive=options.scale > 0)


# -- the ways: what to run for a kind of call ------------------------------------------------------

def _as_many_heads(t: Tensor, q: Tensor) -> Tensor:
    group = q.shape[1] // max(1, t.shape[1])
    return t if group == 1 else t.repeat_interleave(group, 1)


def _aten(name: str) -> Any:
    """torch's own binding of an ATen op costs the host 2 us less than the op, which Dynamo wants to see."""
    return getattr(torch.ops.aten, name).default if is_watched() else getattr(torch, name)


def _cudnn(options: Options, kind: Kind) -> Run:
    if kind.masked:
        return _masked("cudnn", options, kind)
    op = _aten("_scaled_dot_product_cudnn_attention")
    p, causal, scale, recorded = options.dropout_p, kind.causal, options.scale, kind.recorded

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Any:
        out = op(q, k, v, None, recorded, p, causal, False, scale=scale)[0]
        if out.requires_grad and not is_watched():
            out.register_hook(functools.partial(laid_out, strides=out.stride()))
        return out

    return run


def _flash(options: Options, kind: Kind) -> Run:
    op = _aten("_scaled_dot_product_flash_attention")
    dim, p, causal, scale = kind.head_dim, options.dropout_p, kind.causal, options.scale

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Any:
        return op(q, k, v, p, causal, False, scale=scale)[0]

    def windowed(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Any:
        """Aligned to the last query and the last key, as ours."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.ops.aten._flash_attention_forward.default(
            q, k, v, None, None, q.shape[1], k.shape[1], p, False, False, scale=scale,
            window_size_left=options.left, window_size_right=options.right)[0].transpose(1, 2)

    def padded(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Any:
        q, k, v = (F.pad(t, (0, -dim % 8)) for t in (q, k, v))
        return of_eights(q, k, v).narrow(3, 0, dim)

    of_eights = windowed if kind.band else run
    return padded if dim % 8 else of_eights


def _efficient(options: Options, kind: Kind) -> Run:
    if kind.masked:
        return _masked("efficient", options, kind)
    op = _aten("_scaled_dot_product_efficient_attention")

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Any:
        k, v = _as_many_heads(k, q), _as_many_heads(v, q)
        return op(q, k, v, None, kind.recorded, options.dropout_p, kind.causal, scale=options.scale)[0]

    return run


def _masked(way: str, options: Options, kind: Kind) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Tensor:
        if way == "efficient":
            k, v = _as_many_heads(k, q), _as_many_heads(v, q)
        return masked_attention(q, k, v, mask, way, kind.causal, options.dropout_p, options.scale,
                                kind.recorded)

    return run


def _chunks(options: Options, kind: Kind) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Tensor:
        return attention_in_chunks(q, k, v, mask, slopes, options)

    return run


def _hopper(options: Options, kind: Kind) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, slopes: Any = None) -> Tensor:
        return hopper_attention(q, k, v, slopes, options)

    return run


def _torch(options: Options, kind: Kind) -> Run:
    """On a CPU: torch's choice, which is a fused kernel."""
    grouped = {"enable_gqa": True} if kind.heads != kind.kv_heads else {}

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, slopes: Any = None) -> Tensor:
        if mask is not None and mask.is_floating_point() and mask.dtype != q.dtype:
            mask = of_dtype(mask, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, options.dropout_p, kind.causal,
                                              scale=options.scale, **grouped)

    return run


_ways: dict[str, Callable[[Options, Kind], Run]] = {
    "cudnn": _cudnn, "hopper": _hopper, "flash": _flash, "efficient": _efficient, "chunks": _chunks,
    "torch": _torch}
