"""Kernel source: constants + headers + generated functions + unchanged template, one text.

The text is what gets hashed, so nothing it depends on can change unseen: there is no include path.
"""

import functools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusionrt import dtypes
from fusionrt.expr import Expr
from fusionrt.graph import emit
from fusionrt.problem import Problem

# Storage dtype -> bytes an element. The CUDA type is the same name with `_t`.
ITEMSIZE = {**dtypes.ITEMSIZE, "mask": 1}
_INCLUDE, _NAMESPACE = re.compile(r'^#include "(.+)"\n', re.MULTILINE), "namespace fusionrt {"


def directory() -> Path:
    """Where the templates lie: inside an installed package, beside it in a checkout."""
    installed = Path(__file__).parents[1] / "kernels_src"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "kernels_src"


@functools.cache
def template(name: str) -> str:
    return (directory() / name).read_text(encoding="utf-8")


def assemble(stem: str, constants: Sequence[str], functions: Sequence[str]) -> str:
    """The template with what it includes, each file once: headers of the namespace before the functions, in
    the order of their inclusion, the others, which build on these, in their place."""
    return _assembled(stem, "\n".join(constants), "\n".join(functions))


@functools.lru_cache(256)
def _assembled(stem: str, constants: str, functions: str) -> str:
    """The same object for all who ask, whose hash is known."""
    ahead: list[str] = []
    text = _expanded(f"{stem}.cu", ahead, set())
    return "\n".join([constants, *ahead, _NAMESPACE, functions, text, "}  // namespace fusionrt", ""])


def _expanded(name: str, ahead: list[str], seen: set[str]) -> str:
    """A file's text in place of its inclusion; none if it was `seen`, or went `ahead`."""
    if name in seen:
        return ""
    seen.add(name)
    text = _INCLUDE.sub(lambda found: _expanded(found[1], ahead, seen), template(name))
    if _NAMESPACE not in text:
        return text
    ahead.append(text)
    return ""


def arithmetic(acc: str, significant_bits: int, reads_first: bool = False) -> list[str]:
    """What the headers of the prelude need to know: the dtype of the arithmetic, of how many bits results are
    to be, and whether loads stand before stores in the text, so that nobody need move them there."""
    return definitions(acc_t="double" if acc == "float64" else "float", SIGNIFICANT_BITS=significant_bits,
                       READS_FIRST=reads_first)


def definitions(**values: bool | int | str) -> list[str]:
    """Lines of a prologue. A number is a constant; text is a type or, where the name is in capitals, another
    constant.

        definitions(scalar_t="float16_t", VEC=8, TABLES=True, KIND="STAGED")
    """
    return [_definition(name, value) for name, value in values.items()]


def _definition(name: str, value: bool | int | str) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"constexpr auto {name} = {value};" if name.isupper() else f"using {name} = {value};"


def device_function(signature: str, result: Expr, given: Mapping[Expr, str] | None = None) -> list[str]:
    """An expression as a function of a prologue. `given`: what parts of it, such as arguments, are called.

        device_function("acc_t finish(acc_t product)", relu(argument("a0")), {argument("a0"): "product"})
    """
    lines, (value,) = emit([result], "const auto {} = {};", given)
    return [f"__device__ __forceinline__ {signature} {{", *("    " + line for line in lines),
            f"    return {value};", "}"]


class Field(NamedTuple):
    """One member of a kernel's parameter struct; `format` is its `struct` code, of bytes for a tensor map."""

    declaration: str
    format: str

    @property
    def name(self) -> str:
        return re.findall(r"\w+", self.declaration.partition("[")[0])[-1]

    def packed(self, value: Any) -> tuple[Any, ...]:
        """What the struct has of it: of a divisor what takes the division's place, of elements of an array
        zeros behind them as well."""
        if self.format == DIVISOR:
            return magic(value)
        if isinstance(value, (list, tuple)):
            return (*value, *[0] * (len(self.format) - len(value)))
        return (value,)


POINTER, U64, TENSOR_MAP, DIVISOR = "Q", "Q", "128s", "III"
TENSOR_MAP_ALIGNMENT = 64
_FORMATS = {"int": "i", "unsigned": "I", "float": "f", "double": "d", "int64_t": "q", "long long": "q",
            "unsigned long long": U64, "Divisor": DIVISOR, "WideDivisor": U64}


def pointer(dtype: str, name: str, const: bool = True) -> Field:
    return Field(f"{'const ' if const else ''}{dtype}* __restrict__ {name}", POINTER)


def members(type: str, *names: str) -> list[Field]:
    """Numbers of one type."""
    return [Field(f"{type} {name}", _FORMATS[type]) for name in names]


def scalar_fields(problem: Problem) -> list[tuple[Field, tuple[str, ...]]]:
    """Its numbers, in the dtype of the arithmetic, and their values."""
    acc, form = ("double", "d") if problem.acc == "float64" else ("float", "f")
    return [(Field(f"{acc} {name}", form), (name,)) for name in problem.scalars]


class Params:
    """A parameter struct, declared in C++ and packed in Python from one list of fields.

    Tensor maps stand before 8-byte members and those before 4-byte ones, so neither language inserts padding
    between them. What C++ appends, the driver reads as well.
    """

    def __init__(self, fields: Sequence[Field], name: str = "Params") -> None:
        alignments = [_alignment(f.format) for f in fields]
        assert alignments == sorted(alignments, reverse=True), "fields must not grow in size"
        self.declaration = f"struct {name} {{\n" + "".join(
            f"    {f.declaration};\n" for f in fields) + "};"
        format = "=" + "".join(f.format for f in fields)
        self.packer = struct.Struct(f"{format}{-struct.calcsize(format) % max(alignments, default=1)}x")

    def converted(self, *values: Any) -> list[Any]:
        """Numbers beyond float32 as infinities, which C makes of them and Python refuses."""
        return [_single(v) if code == "f" else v
                for v, (code, _) in zip(values, self.places(), strict=True)]

    def places(self) -> list[tuple[str, int]]:
        """Of each value that is packed its code and the byte where it stands."""
        found, place = [], 0
        for count, code in re.findall(r"(\d*)([a-zA-Z])", self.packer.format):
            each, times = (count + code, 1) if code in "sx" else (code, int(count or 1))
            for _ in range(times):
                found += [(code, place)] if code != "x" else []
                place += struct.calcsize("=" + each)
        return found


def _single(number: float) -> float:
    try:
        struct.pack("=f", number)
    except OverflowError:
        return math.copysign(math.inf, number)
    return number


def _alignment(format: str) -> int:
    code = format.lstrip("0123456789")[0]
    return TENSOR_MAP_ALIGNMENT if code == "s" else struct.calcsize("=" + code)


def magic(divisor: int) -> tuple[int, int, int]:
    """(value, multiplier, shift) with n // value == (mulhi(n, multiplier) + n) >> shift, n < 2^31.

    Granlund & Montgomery, "Division by Invariant Integers using Multiplication", PLDI 1994.
    """
    shift = max(divisor - 1, 0).bit_length()
    return divisor, ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift


class Specialisation(NamedTuple):
    """A kernel's text, the name of its entry, and how to fill its parameters.

    `values` names a run-time value (an operand, a scalar, `seed`, ...) or holds a constant, one
    tuple a field of the struct.
    """

    text: str
    entry: str
    params: Params
    values: tuple[tuple[str | int, ...], ...]
