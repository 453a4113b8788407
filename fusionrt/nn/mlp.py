"""Feed-forward blocks: two linear layers and what stands between them, and the gated ones of LLMs."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from fusionrt.arguments import check_counts
from fusionrt.nn.activation import Activated, known
from fusionrt.nn.reading import feed_forward, gated_feed_forward
from fusionrt.nn.sharing import expect
from fusionrt.ops.activations import is_tanh
from fusionrt.ops.dropout import scale_of_kept

G = TypeVar("G", bound="_Gated")


class FusedMLP(Activated):
    """linear2(dropout(activation(linear1(x)))).

    hidden_features: 4 in_features unless given; out_features: in_features unless given. activation: as in
    `FusedLinear`. recompute: the backward pass makes the hidden layer again, which is then not stored.
    names: of the two `torch.nn.Linear`s, in the state too: ("linear1", "linear2") as in
    `torch.nn.TransformerEncoderLayer`; ("0", "3") for `torch.nn.Sequential(linear, act, dropout, linear)`,
    whose weights then load both ways. `from_torch` of a Sequential keeps its names.
    forward: (..., in_features) -> (..., out_features). The linear layers are read: a fused op takes
    their weights. They are called where that would compute something else: those of another forward (LoRA's,
    quantized ones) and with hooks (weight_norm, prune). Parametrizations are read.

    Raises ValueError and TypeError for an activation that is none, a dropout outside [0, 1], and what
    `fusionrt.ffn` raises.

        mlp = FusedMLP(512, activation="gelu", dropout=0.1)
        mlp = FusedMLP.from_torch(torch.nn.Sequential(linear1, torch.nn.GELU(), linear2))
    """

    def __init__(self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
                 *, activation: Any = "gelu", dropout: float = 0.0, bias: bool = True,
                 recompute: bool = False, names: tuple[str, str] = ("linear1", "linear2"),
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_counts("FusedMLP", {"hidden_features": hidden_features, "out_features": out_features},
                     in_features=in_features)
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self._choose(activation)
        scale_of_kept("FusedMLP", dropout, False, "dropout")
        if len(names) != 2 or names[0] == names[1]:
            raise ValueError(f"FusedMLP: names must be two different ones, got {names!r}")
        self.dropout, self.recompute, self.names = dropout, recompute, names
        self.add_module(names[0], nn.Linear(in_features, hidden, bias, device, dtype))
        self.add_module(names[1], nn.Linear(hidden, out, bias, device, dtype))

    @classmethod
    def from_modules(cls, linear1: nn.Linear, linear2: nn.Linear, activation: Any = "gelu",
                     dropout: float = 0.0, *, recompute: bool = False,
                     names: tuple[str, str] = ("linear1", "linear2")) -> FusedMLP:
        """Of these linear layers themselves, with the mode of the second one. TypeError for other modules."""
        for name, linear in (("linear1", linear1), ("linear2", linear2)):
            expect(cls, linear, nn.Linear, argument=name)
        if linear1.out_features != linear2.in_features:
            raise ValueError(f"FusedMLP: linear2 must take the {linear1.out_features} features of linear1, "
                             f"got {linear2.in_features}")
        made = cls(1, 1, 1, activation=activation, dropout=dropout, recompute=recompute, names=names,
                   device="meta")
        made.add_module(names[0], linear1)
        made.add_module(names[1], linear2)
        made.training = linear2.training
        return made

    @classmethod
    def from_torch(cls, module: nn.Sequential, *, recompute: bool = False) -> FusedMLP:
        """Of a torch.nn.Sequential(linear, activation, [dropout,] linear), with its names of the two."""
        expect(cls, module, nn.Sequential)
        names, parts = zip(*module._modules.items(), strict=True) if len(module) else ((), ())
        drops = [part.p for part in parts[2:-1] if isinstance(part, nn.Dropout)]
        if len(parts) not in (3, 4) or len(drops) != len(parts) - 3:
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise ValueError("FusedMLP: module must hold a Linear, an activation, perhaps a Dropout, and a "
                             f"Linear, got {kinds or 'nothing'}")
        return cls.from_modules(parts[0], parts[-1], known("FusedMLP", parts[1]), sum(drops),
                                recompute=recompute, names=(names[0], names[-1]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        first, second = (self._modules[name] for name in self.names)
        return feed_forward(input, first, second, self.activation, self.dropout, self.training,
                            self.recompute)

    def extra_repr(self) -> str:
        more = [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([super().extra_repr(), *more, *(["recompute=True"] if self.recompute else [])])


class _Gated(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)); what FusedSwiGLU and FusedGEGLU share."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int | None = None, *,
                 bias: bool = False, packed: bool = False, recompute: bool = False, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        check_counts(type(self).__name__, {"out_features": out_features}, in_features=in_features,
                     hidden_features=hidden_features)
        where, out = {"device": device, "dtype": dtype}, in_features if out_features is None else out_features
        self.packed, self.recompute = packed, recompute
        if packed:
            self.gate_up_proj = nn.Linear(in_features, 2 * hidden_features, bias, **where)
        else:
            self.gate_proj = nn.Linear(in_features, hidden_features, bias, **where)
            self.up_proj = nn.Linear(in_features, hidden_features, bias, **where)
        self.down_proj = nn.Linear(hidden_features, out, bias, **where)
        self.register_load_state_dict_pre_hook(_repacked)

    @classmethod
    def from_modules(cls: type[G], gate_proj: nn.Linear, up_proj: nn.Linear | None, down_proj: nn.Linear,
                     **options: Any) -> G:
        """Of these linear layers themselves, with the mode of the last one; without up_proj the first one is
        gate and up, packed. `options`: the constructor's. TypeError for other modules."""
        packed = up_proj is None
        parts = {"gate_up_proj" if packed else "gate_proj": gate_proj}
        parts |= {"down_proj": down_proj} if up_proj is None else {"up_proj": up_proj, "down_proj": down_proj}
        made = cls(1, 1, packed=packed, device="meta", **options)
        for name, part in parts.items():
            expect(cls, part, nn.Linear, argument=name)
            made.add_module(name, part)
        made.training = down_proj.training
        return made

    def _fed_forward(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = (self.gate_up_proj, None) if self.packed else (self.gate_proj, self.up_proj)
        return gated_feed_forward(x, gate, up, self.down_proj, activation, self.recompute)

    def extra_repr(self) -> str:
        return "recompute=True" if self.recompute else ""


def _repacked(module: _Gated, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Weights that were saved packed load into a module that is not, and the other way."""
    for kind in ("weight", "bias"):
        gate, up, both = (f"{prefix}{name}.{kind}" for name in ("gate_proj", "up_proj", "gate_up_proj"))
        if module.packed and gate in state and up in state:
            state[both] = torch.cat([state.pop(gate), state.pop(up)])
        elif not module.packed and both in state:
            state[gate], state[up] = state.pop(both).chunk(2)


class FusedSwiGLU(_Gated):
    """down_proj(silu(gate_proj(x)) * up_proj(x)): the feed-forward block of LLaMA.

    packed: gate and up are one linear layer `gate_up_proj`, the gate's rows first (as Phi-3 has it), and one
    matrix product. recompute: the backward pass makes the hidden layer again, which is then not stored.
    forward: (..., in_features) -> (..., out_features), in_features unless given. The linear layers are read
    or called as those of `FusedMLP`.

    State: `gate_proj.weight`, `up_proj.weight`, `down_proj.weight`, or `gate_up_proj.weight` and
    `down_proj.weight`, with their biases if there are any; either kind loads into either.
    Raises what `fusionrt.swiglu_mlp` does.

        mlp = FusedSwiGLU(4096, 11008)
        mlp = FusedSwiGLU.from_torch(llama.layers[0].mlp)
    """

    @classmethod
    def from_torch(cls, module: nn.Module, *, recompute: bool = False) -> FusedSwiGLU:
        """Of the linear layers of a module that has them by these names, such as LLaMA's.

        TypeError for one that has not, or whose `act_fn` is not silu."""
        _activation_of(cls, module, "silu")
        return cls.from_modules(*_layers(module), recompute=recompute)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._fed_forward(input, "silu")


class FusedGEGLU(_Gated):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)): the feed-forward block of Gemma.

    approximate: "none" (erf) or "tanh". All else as in `FusedSwiGLU`; raises what `fusionrt.geglu_mlp` does,
    ValueError for another `approximate`.

        mlp = FusedGEGLU(2048, 8192, approximate="tanh")
    """

    def __init__(self, in_features: int, hidden_features: int, out_features: int | None = None, *,
                 approximate: str = "none", bias: bool = False, packed: bool = False, recompute: bool = False,
                 device: Any = None, dtype: Any = None) -> None:
        is_tanh("FusedGEGLU", approximate)
        super().__init__(in_features, hidden_features, out_features, bias=bias, packed=packed,
                         recompute=recompute, device=device, dtype=dtype)
        self.approximate = approximate

    @classmethod
    def from_torch(cls, module: nn.Module, *, recompute: bool = False) -> FusedGEGLU:
        """Of the linear layers of a module that has them by these names, such as Gemma's.

        TypeError for one that has not, or whose `act_fn` is not gelu."""
        approximate = "tanh" if _activation_of(cls, module, "gelu", "gelu_tanh") == "gelu_tanh" else "none"
        return cls.from_modules(*_layers(module), recompute=recompute, approximate=approximate)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._fed_forward(input, "gelu_tanh" if is_tanh("geglu_mlp", self.approximate) else "gelu")

    def extra_repr(self) -> str:
        shown = f"approximate={self.approximate!r}" if self.approximate != "none" else ""
        return ", ".join(filter(None, [shown, super().extra_repr()]))


def _layers(module: nn.Module) -> tuple[Any, Any, Any]:
    packed = getattr(module, "gate_up_proj", None)
    gate, up = (getattr(module, "gate_proj", None), getattr(module, "up_proj", None)) if packed is None else (
        packed, None)
    return gate, up, getattr(module, "down_proj", None)


def _activation_of(made: type[_Gated], module: nn.Module, *names: str) -> Any:
    activation = known(made.__name__, getattr(module, "act_fn", None))
    if activation not in names:
        raise TypeError(f"{made.__name__}: module must have an act_fn that is {' or '.join(names)}, got "
                        f"{activation}")
    return activation
