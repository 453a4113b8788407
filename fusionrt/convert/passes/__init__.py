"""The passes, in the order in which they run: name -> function of the Edits of one graph."""

from __future__ import annotations

from collections.abc import Callable

from fusionrt.convert.graph import Edits
from fusionrt.convert.passes.aligned_rows import aligned_rows
from fusionrt.convert.passes.any_of import any_of
from fusionrt.convert.passes.attention import attention
from fusionrt.convert.passes.biases import biases
from fusionrt.convert.passes.casts import casts
from fusionrt.convert.passes.channel_norms import channel_norms
from fusionrt.convert.passes.checkpoints import checkpoints
from fusionrt.convert.passes.clusters import clusters
from fusionrt.convert.passes.concatenations import concatenations
from fusionrt.convert.passes.constants import constants
from fusionrt.convert.passes.convolution import convolution
from fusionrt.convert.passes.encoder_layers import encoder_layers
from fusionrt.convert.passes.feed_forward import feed_forward
from fusionrt.convert.passes.from_weights import from_weights
from fusionrt.convert.passes.identities import identities
from fusionrt.convert.passes.in_place import in_place, restored
from fusionrt.convert.passes.layout import layout, weights
from fusionrt.convert.passes.linear import linear
from fusionrt.convert.passes.losses import losses
from fusionrt.convert.passes.moved_rows import moved_rows
from fusionrt.convert.passes.packed import packed, packed_linears
from fusionrt.convert.passes.patches import patches
from fusionrt.convert.passes.pixels import pixels
from fusionrt.convert.passes.pooling import pooling
from fusionrt.convert.passes.recomputation import recomputation
from fusionrt.convert.passes.result_strides import result_strides
from fusionrt.convert.passes.rotary import rotary
from fusionrt.convert.passes.spelled_out import addmm, gelu, rms_norm
from fusionrt.convert.passes.squeeze import squeeze
from fusionrt.convert.passes.stacked import stacked
from fusionrt.convert.passes.unused import unused
from fusionrt.convert.passes.window_masks import window_masks

PASSES: dict[str, Callable[[Edits], None]] = {
    # what is not there for the result
    "checkpoints": checkpoints, "identities": identities, "in_place": in_place, "unused": unused,
    "constants": constants,
    # torch's names for what is spelled out, and the reverse, another layout
    "encoder_layers": encoder_layers, "rms_norm": rms_norm, "gelu": gelu, "addmm": addmm, "patches": patches,
    "layout": layout, "stacked": stacked,
    # structured ops with what stands around them, what they read and is kept (not before "rotary", which sees
    # in how tables are made that their halves are equal)
    "rotary": rotary, "window_masks": window_masks, "from_weights": from_weights, "attention": attention,
    "convolution": convolution, "channel_norms": channel_norms, "recomputation": recomputation,
    "squeeze": squeeze, "pixels": pixels, "pooling": pooling,
    "weights": weights, "packed": packed, "casts": casts, "feed_forward": feed_forward, "biases": biases,
    "linear": linear, "losses": losses, "aligned_rows": aligned_rows, "any_of": any_of,
    "moved_rows": moved_rows, "packed_linears": packed_linears,
    # the rest
    "clusters": clusters, "restored": restored, "result_strides": result_strides,
    "concatenations": concatenations}
