"""Texts of the optimizers' CPU kernels: what kernels_src/optimizer_step.cu and its two companions say, in the
words of `memory.scope`. The range that a kernel shares out is that of the chunks.

One loop over a chunk updates everything: LLVM vectorises it for up to four arrays, as AdamW's.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from fusionrt.dtypes import ITEMSIZE, element_of
from fusionrt.optim.quantised import BLOCK
from fusionrt.optim.table import CHUNK, CPU_SCALARS, Row

if TYPE_CHECKING:
    from fusionrt.optim.kernels import Kind


def _tensor(field: str) -> str:
    """Of tensor t, as its Row has it."""
    return f"tensors[{len(Row._fields)} * t + {Row._fields.index(field)}]"


def _prepared(scalar: str) -> str:
    """Of tensor t, as `prepare` computes it."""
    return f"prepared[{len(CPU_SCALARS)} * t + {CPU_SCALARS.index(scalar)}]"


def _indented(text: str, levels: int) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), "    " * levels)


def norm(dtype: str) -> str:
    """Sums of squares, one a chunk: the same whatever the number of threads."""
    return f"""
    for c in range(start, stop):
        t = int64_of(chunks[2 * c])
        total = float64_of(0)
        if grads[t] != 0:
            first = int64_of(chunks[2 * c + 1]) * {CHUNK}
            count = min({CHUNK}, {_tensor("numel")} - first)
            g_data = {element_of(dtype)}_at(grads[t] + first * {ITEMSIZE[dtype]})
            for i in range(count):
                g = float64_of(load_{dtype}(g_data[i]))
                total = plus(total, g * g)
        squares[c] = total
"""


def prepare(kind: Kind) -> str:
    """The scalars of every tensor, as optimizer_prepare.cu; those of float32 are rounded at their use."""
    correction = {
        "ADAM": """
            size = lr / (ONE - pow_(beta1, step))
            correction = ONE / sqrt(ONE - pow_(beta2, step))""",
        "SGD": """
            correction = where(step == ONE, ONE, ZERO)""",
    }.get(kind.rule, "")
    kept = "\n        ".join(f"{_prepared(name)} = {name}" for name in CPU_SCALARS)
    return f"""
    if lr_tensor != 0:
        lr = float64_of(float32_at(lr_tensor)[0])
    factor, skip = ONE, ZERO
    if grad_scale != 0:
        factor = ONE / float64_of(float32_at(grad_scale)[0])
    if found_inf != 0 and float32_at(found_inf)[0] != 0:
        skip = ONE
    if squares != 0:
        square, total, all_squares = float64_at(squares), ZERO, ZERO
        for k in range(n_squares):
            all_squares += square[k]
            if k < n_clipped:
                total += square[k]
        found_norm = sqrt(total) * abs_(factor)
        if skip_nonfinite != 0 and not sqrt(all_squares) * abs_(factor) <= 1.7976931348623157e308:
            skip = ONE
        ratio = max_norm / (found_norm + 1e-6)
        factor *= where(ratio > ONE, ONE, ratio)
        if norm != 0:
            {kind.acc}_at(norm)[0] = found_norm
    if maximize != 0:
        factor = -factor
    for t in range(n_tensors):
        if grads[t] == 0:
            continue
        size, correction = lr, ZERO
        counter = {_tensor("step")}
        if counter != 0 and skip == 0:
            counted = float32_at(counter)
            step = float64_of(counted[0]) + ONE
            counted[0] = step{correction}
        decay = {"ONE - lr * weight_decay" if kind.decoupled else "weight_decay"}
        {kept}
"""


# -- 16 and 8 bits ---------------------------------------------------------------------------------

# 32 random bits of an element: the low half rounds the first state, the high one the second.
_CHANCE = """
@inline
def chance_bits(element, counted, numbered, seed):
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = numbered | np.uint64(element) >> np.uint64(2)
    w0, w1, w2, w3 = philox7(np.uint32(counted & low), np.uint32(counted >> half), np.uint32(counter & low),
                             np.uint32(counter >> half), np.uint32(seed & low), np.uint32(seed >> half))
    k = np.uint64(element) & np.uint64(3)
    return where(k < 2, where(k == 0, w0, w1), where(k == 2, w2, w3))

@inline
def by_chance(x, bits, shift):
    word = np.uint32(float_to_bits(np.float32(x)))
    moved = np.uint32(word + np.uint32(np.uint32(np.uint32(bits) >> np.uint32(shift)) & np.uint32(0xFFFF)))
    special = np.uint32(word & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    return np.uint16(where(special, np.uint32(store_bfloat16(x)), np.uint32(moved >> np.uint32(16))))
"""
# Eight levels to an octave below the block's largest: kernels_src/optimizer_step.cu.
_CODES = """
@inline
def decoded(code, scale, n):
    top, level = (255, np.int32(code)) if n else (127, np.int32(code) & 127)
    magnitude = where(level == 0, scale * ZERO, scale * exp2(acc_t(level - top) * acc_t(0.125)))
    return where(n == 0 and code >= 128, -magnitude, magnitude)

@inline
def encoded(x, scale, n, bits):
    top = 255 if n else 127
    magnitude = abs_(x)
    if not magnitude > ZERO:
        return np.uint8(0)
    place = log2(magnitude / scale) * acc_t(8) + acc_t(top)
    if n == 1:
        below = floor(place)
        odds = (exp2((place - below) * acc_t(0.125)) - ONE) * acc_t(11.048456)
        up = odds * acc_t(65536) > acc_t(np.uint32(bits) >> np.uint32(16)) + acc_t(0.5)
        place = where(up, below + ONE, below)
    level = np.int64(cast_int32(rint(place)))
    level = max(np.int64(1 if n else 0), min(level, np.int64(top)))
    return np.uint8(where(n == 0 and x < ZERO and level > 0, level | np.int64(128), level))
"""


# -- the update ------------------------------------------------------------------------------------

_COUPLED_DECAY = "g = where(decay != 0, g + decay * x, g)"  # an infinite x without decay is no NaN


def _lerp(x: str, k: int) -> str:
    """beta x + weight g, as torch's lerp: of small betas x may be much larger than what is left of it."""
    return f"where(weight{k} < 0.5, {x} + weight{k} * (g - {x}), g - beta{k} * (g - {x}))"


def _rule(kind: Kind) -> str:
    """Statements over x, g and the states s0, s1, s2."""
    if kind.rule == "ADAM":
        decay = "x = x * decay" if kind.decoupled else _COUPLED_DECAY
        second = "s2 = maximum(s2, s1)" if kind.states == 3 else ""
        return f"""
g = g * factor
{decay}
s0 = {_lerp("s0", 1)}
s1 = beta2 * s1 + weight2 * g * g
{second}
x = x - size * (s0 / (sqrt({"s2" if second else "s1"}) * correction + eps))
"""
    if kind.rule == "SGD":
        momentum = f"""
s0 = where(correction != 0, g, beta1 * s0 + weight1 * g)
g = {"g + beta1 * s0" if kind.nesterov else "s0"}
"""
        return f"g = g * factor\n{_COUPLED_DECAY}\n{momentum if kind.states else ''}\nx = x - size * g"
    if kind.rule == "LION":
        return f"""
g = g * factor
c = {_lerp("s0", 1)}
x = x * decay - where(c > 0, size, where(c < 0, -size, c * size))
s0 = {_lerp("s0", 2)}
"""
    return {"AVERAGE": f"x = {_lerp('x', 1)}",
            "SCALE": "x = g * factor"}[kind.rule]


_HEAD = """
    for chunk in range(start, stop):
        t = int64_of(chunks[2 * chunk])
        if grads[t] == 0{skips}:
            continue
        first = int64_of(chunks[2 * chunk + 1]) * {chunk}
        count = min({chunk}, {numel} - first)
"""


def step(kind: Kind) -> str:
    """The update of kernels_src/optimizer_step.cu."""
    skips = "" if kind.rule == "AVERAGE" else f" or {_prepared('skip')} != 0"
    if kind.rule == "SCALE":
        skips += f" or {_prepared('factor')} == 1"
    lines = [_HEAD.strip("\n").format(skips=skips, numel=_tensor("numel"), chunk=CHUNK)]
    body = []
    if kind.rule != "AVERAGE":
        body += [f"{name} = acc_t({_prepared(name)})" for name in CPU_SCALARS]
    own = "grads[t]" if kind.rule == "SCALE" else _tensor("param")
    arrays = {"g": ("grads[t]", kind.grad), "x": (own, kind.param)}
    if kind.master:
        arrays["master"] = (_tensor("master"), "float32")
    arrays |= {f"s{n}": (_tensor(f"state{n}"), kind.state) for n in range(kind.states)}
    body += [f"{name}_data = {element_of(dtype)}_at({address} + first * {ITEMSIZE[dtype]})"
             for name, (address, dtype) in arrays.items()]
    if _draws(kind):
        body += [f"counted = uint64_of(int64_of(float32_at({_tensor('step')})[0]))",
                 f"numbered = uint64_of({_tensor('position')}) << uint64_of(40)"]
    lines += ["        " + line for line in body]
    lines.append(_quantised(kind) if _is_quantised(kind) else _plain(kind))
    return "\n".join(lines) + "\n"


def functions(kind: Kind) -> str:
    """That the text of `step` calls."""
    return _CHANCE * _draws(kind) + _CODES * _is_quantised(kind)


def _draws(kind: Kind) -> bool:
    return kind.states > 0 and (kind.stochastic or kind.state == "uint8")


def _is_quantised(kind: Kind) -> bool:
    return kind.states > 0 and kind.state == "uint8"


def _loads(kind: Kind) -> list[str]:
    own = "master_data[i]" if kind.master else f"load_{kind.param}(x_data[i])"
    return [f"x = {own}" if kind.rule != "SCALE" else "", f"g = load_{kind.grad}(g_data[i])"]


def _stores(kind: Kind) -> list[str]:
    return ["master_data[i] = x" if kind.master else "", f"x_data[i] = store_{kind.param}(x)"]


def _block(lines: list[str], levels: int) -> str:
    return "\n".join(_indented(line, levels) for line in lines if line.strip())


def _plain(kind: Kind) -> str:
    states = range(kind.states)
    lines = [*_loads(kind), *(f"s{n} = load_{kind.state}(s{n}_data[i])" for n in states), _rule(kind),
             *_stores(kind)]
    if kind.stochastic and kind.states:
        lines.append("bits = chance_bits(first + i, counted, numbered, uint64_of(seed))")
    for n in states:
        by_chance = kind.stochastic and n < 2
        lines.append(f"s{n}_data[i] = " + (f"by_chance(s{n}, bits, {16 * n})" if by_chance
                                           else f"store_{kind.state}(s{n})"))
    return _indented("for i in range(count):", 2) + "\n" + _block(lines, 3)


def _quantised(kind: Kind) -> str:
    """Twice over each block: what its states will be at most, then with that the update itself."""
    states = range(kind.states)
    update = [*_loads(kind), *(f"s{n} = decoded(s{n}_data[i], scale{n}, {n})" for n in states), _rule(kind)]
    before = [line for n in states for line in (f"scale{n} = float32_at({_tensor(f'scale{n}')})[block]",
                                                f"top{n} = ZERO")]
    bits = "chance_bits(first + i, counted, numbered, uint64_of(seed))" if kind.states > 1 else "uint64_of(0)"
    encode = [f"bits = {bits}",
              *(f"s{n}_data[i] = encoded(s{n}, top{n}, {n}, bits)" for n in states)]
    return "\n".join([
        _indented(f"for base in range(0, count, {BLOCK}):", 2),
        _block([f"end, block = min(base + {BLOCK}, count), (first + base) // {BLOCK}", *before,
                "for i in range(base, end):"], 3),
        _block([*update, *(f"top{n} = larger_or_nan(top{n}, abs_(s{n}))" for n in states)], 4),
        _indented("for i in range(base, end):", 3),
        _block([*update, *_stores(kind), *encode], 4),
        _block([f"float32_at({_tensor(f'scale{n}')})[block] = top{n}" for n in states], 3)])
