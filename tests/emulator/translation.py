"""From the text of a CUDA kernel to C++ that includes cuda.h.

Of CUDA's syntax a compiler of C++ refuses only inline assembly and shared memory sized at the launch. An
instruction becomes a call of its function in cuda.h, in whatever function of a kernel it stands. One that has
none there fails where it is executed: kernels contain some for architectures that are not emulated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEADER = Path(__file__).with_name("cuda.h")
_KNOWN = frozenset(re.findall(r"\bptx_(\w+)\(", HEADER.read_text(encoding="utf-8")))
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
# What says where memory is cached, and in which order others see it, while blocks run one after the other.
# Not `acquire`, by which a block waits for another.
_HINTS = re.compile(r"\.(?:nc|cs|ca|cg|relaxed|acq_rel|gpu|L2::\w+)(?=\.|$)")
_STRINGS = re.compile(r'"((?:[^"\\]|\\.)*)"|#(\w+)')  # of a template; between them parameters of a macro
_SIZED_AT_LAUNCH = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")


class Untranslated(Exception):
    """Something that this file does not know how to say in C++."""


def translated(text: str, entry: str, architecture: int) -> str:
    """A translation unit that exports the kernel `entry` as `emu_entry`, of its parameters' address."""
    body = _SIZED_AT_LAUNCH.sub(r"static \1* const \2 = reinterpret_cast<\1*>(emu_shared);", text)
    if "extern __shared__" in body:
        raise Untranslated(f"{entry}: shared memory that is sized at the launch is declared in a new way")
    if not re.search(rf"\b{entry}\(const __grid_constant__ Params ", body):
        raise Untranslated(f"{entry}: no kernel of this name takes `const __grid_constant__ Params`")
    return "\n".join([
        f"#define __CUDA_ARCH__ {architecture}", f'#include "{HEADER.name}"', _without_assembly(body),
        'extern "C" void emu_entry(const void* params) {',
        f"    fusionrt::{entry}(*static_cast<const fusionrt::Params*>(params));", "}", ""])


def instructions(text: str) -> set[str]:
    """Names of functions in cuda.h that a text's instructions call."""
    return {instruction.name for _, _, instruction in _statements(text) if instruction.name in _KNOWN}


def known() -> frozenset[str]:
    """Those that there are."""
    return _KNOWN


class Instruction(NamedTuple):
    """Of one asm statement."""

    template: str         # names of a macro's parameters in it are X
    stringised: list[str]  # and are these
    operands: list[str]   # %0, %1, ... in C++

    @property
    def name(self) -> str:
        opcode = re.split(r"[\s;]", self.template, maxsplit=1)[0]
        return re.sub(r"\W+", "_", _HINTS.sub("", opcode))

    @property
    def call(self) -> str:
        if not self.template:  # which only keeps the compiler from moving something
            return "(void)0"
        given = self.template.removesuffix(";").partition(" ")[2]
        if self.name not in _KNOWN or ";" in given:
            return f"emu::fail({json.dumps('cuda.h has no function for ' + self.template)})"
        values = re.sub(r"[\[\]{}]", "", given)
        arguments = [f"#{name}" for name in self.stringised] + [values] * bool(values)
        return re.sub(r"%(\d+)", lambda m: f"({self.operands[int(m[1])]})",
                      f"ptx_{self.name}({', '.join(arguments)})")


def _without_assembly(text: str) -> str:
    parts, at = [], 0
    for begin, end, instruction in _statements(text):
        parts += [text[at:begin], instruction.call]
        at = end
    return "".join([*parts, text[at:]])


def _statements(text: str) -> Iterator[tuple[int, int, Instruction]]:
    """Where each asm statement begins and ends, without its semicolon, and what it says."""
    for match in _ASM.finditer(text):
        end = _closing(text, match.end())
        template, *lists = _split(text[match.end():end], ":")
        operands = [_in_parentheses(o) for given in lists[:2] for o in _split(given, ",") if o.strip()]
        found = _STRINGS.findall(template)
        yield match.start(), end + 1, Instruction(
            "".join("X" if name else json.loads(f'"{string}"') for string, name in found),
            [name for _, name in found if name], operands)


def _closing(text: str, at: int) -> int:
    """Of the parenthesis that is open at `at`."""
    depth = 1
    for k, c in _outside_strings(text, at):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return k
    raise Untranslated(f"no end of the asm statement {text[at:at + 80]!r}")


def _split(text: str, by: str) -> list[str]:
    """At what stands neither in a string nor in brackets of any kind."""
    parts, depth, begin = [], 0, 0
    for k, c in _outside_strings(text, 0):
        depth += (c in "([{") - (c in ")]}")
        if c == by and depth == 0:
            parts.append(text[begin:k])
            begin = k + 1
    return [*parts, text[begin:]]


def _outside_strings(text: str, at: int) -> Iterator[tuple[int, str]]:
    inside = False
    for k in range(at, len(text)):
        if text[k] == '"' and text[k - 1] != "\\":
            inside = not inside
        elif not inside:
            yield k, text[k]


def _in_parentheses(operand: str) -> str:
    """Of `"=r"(x)` the x."""
    return operand[operand.index("(") + 1:operand.rindex(")")]
