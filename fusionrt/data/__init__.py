"""Data on its way into a network: images, tokens and time series, prepared in one pass each.

One file an idea: `image` with `augment` (random parameters), `samples` (what an image goes through),
`image_gpu` and `image_cpu`; `tokens` with `tokens_kernels`; `window` with `window_rows` (what is asked for),
`window_gpu`, `window_cpu`, `window_cpu_few`, `window_cpu_pieces` and `window_extreme` (a gradient).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrt import lazy

_MODULE = {
    "RandomParameters": "augment", "image_preprocess": "image", "random_parameters": "augment",
    "sliding_window": "window", "token_preprocess": "tokens",
}
_SUBMODULES = ("augment", "image", "tokens", "window")

__getattr__, __dir__, __all__ = lazy.attach(__name__, _MODULE, _SUBMODULES)

if TYPE_CHECKING:
    from fusionrt.data.augment import RandomParameters as RandomParameters
    from fusionrt.data.augment import random_parameters as random_parameters
    from fusionrt.data.image import image_preprocess as image_preprocess
    from fusionrt.data.tokens import token_preprocess as token_preprocess
    from fusionrt.data.window import sliding_window as sliding_window
