"""Products on Hopper's matrix units (kernels_src/sm90.cuh): the instruction names each of its registers, so
its text is made for a number of columns."""

from __future__ import annotations

_TYPES = {"bfloat16": "f32.bf16.bf16", "float16": "f32.f16.f16"}


def multiply(dtype: str, n: int, *, registers: bool = False, begins: bool = False) -> list[str]:
    """Lines of `multiply(sums, a, b)` of a warpgroup: 64 × n sums, to each of which it adds 16 products. `a`
    and `b`, of 64 and of n rows, are as `describe` gives them; `registers`: `a` is there, and `b` has n
    columns. `begins`: `add`, one argument more, is 0 where the sums begin."""
    count = n // 2
    sums = ", ".join(f"%{k}" for k in range(count))
    outputs = ", ".join(f'"+f"(sums[{k}])' for k in range(count))
    if registers:
        given, inputs, modes = "const unsigned (&a)[4]", [f'"r"(a[{k}])' for k in range(4)], "1, 1, 1"
        a = "{" + ", ".join(f"%{count + k}" for k in range(4)) + "}"
    else:
        given, inputs, modes = "unsigned long long a", ['"l"(a)'], "1, 1, 0, 0"
        a = f"%{count}"
    b = count + len(inputs)
    inputs.append('"l"(b)')
    adds = "setp.eq.b32 add, 0, 0"
    if begins:
        adds = f"setp.ne.b32 add, %{b + 1}, 0"
        inputs.append('"r"(add)')
    return [
        f"__device__ __forceinline__ void multiply(float (&sums)[{count}], {given}, unsigned long long b"
        f"{', int add' * begins}) {{",
        f'    asm volatile("{{\\n.reg .pred add;\\n{adds};\\n"',
        f'                 "wgmma.mma_async.sync.aligned.m64n{n}k16.{_TYPES[dtype]} {{{sums}}}, "',
        f'                 "{a}, %{b}, add, {modes};\\n}}"',
        f"                 : {outputs} : {', '.join(inputs)});",
        "}"]
