"""The passes, in the order in which they run: name -> function of the Edits of one graph."""

from __future__ import annotations

from collections.abc import Callable

from fusionrt.convert.graph import Edits
from fusionrt.convert.passes.attention import attention
from fusionrt.convert.passes.biases import biases
from fusionrt.convert.passes.casts import casts
from fusionrt.convert.passes.channel_norms import channel_norms
from fusionrt.convert.passes.checkpoints import checkpoints
from fusionrt.convert.passes.clusters import clusters
from fusionrt.convert.passes.concatenations import concatenations
from fusionrt.convert.passes.constants import constants
from fusionrt.convert.passes.convolution import convolution
from fusionrt.convert.passes.feed_forward import feed_forward
from fusionrt.convert.passes.identities import identities
from fusionrt.convert.passes.in_place import in_place, restored
from fusionrt.convert.passes.layout import layout, weights
from fusionrt.convert.passes.linear import linear
from fusionrt.convert.passes.losses import losses
from fusionrt.convert.passes.packed import packed
from fusionrt.convert.passes.pixels import pixels
from fusionrt.convert.passes.pooling import pooling
from fusionrt.convert.passes.recomputation import recomputation
from fusionrt.convert.passes.rotary import rotary
from fusionrt.convert.passes.spelled_out import addmm, gelu, rms_norm
from fusionrt.convert.passes.squeeze import squeeze
from fusionrt.convert.passes.stacked import stacked

PASSES: dict[str, Callable[[Edits], None]] = {
    # what is not there for the result
    "checkpoints": checkpoints, "identities": identities, "constants": constants, "in_place": in_place,
    # torch's names for what is spelled out, another layout
    "rms_norm": rms_norm, "gelu": gelu, "addmm": addmm, "layout": layout, "stacked": stacked,
    # structured ops with what stands around them
    "rotary": rotary, "attention": attention, "convolution": convolution, "channel_norms": channel_norms,
    "recomputation": recomputation, "squeeze": squeeze, "pixels": pixels, "pooling": pooling,
    "weights": weights, "packed": packed, "casts": casts, "feed_forward": feed_forward, "biases": biases,
    "linear": linear, "losses": losses,
    # the rest
    "clusters": clusters, "restored": restored, "concatenations": concatenations}
