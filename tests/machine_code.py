"""What a cubin's machine code tells by the codes of its operations: of Volta and later, 128 bits each."""

from __future__ import annotations

import struct

WAIT = 0x82E  # ACQBULK, which is griddepcontrol.wait
# LD, LDG, ST, STG, RED, ATOMG, LDGSTS, UBLKCP (bulk copies), UBLKPF (their prefetch)
MEMORY = {0x980, 0x981, 0x985, 0x986, 0x98E, 0x9A8, 0xFAE, 0x3BA, 0x3BC}


def operations(cubin: bytes) -> dict[str, list[int]]:
    """Of each kernel, in the order in which they stand."""
    begin, = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, begin + k * size) for k in range(count)]
    names = sections[names_at][4]
    found = {}
    for name_at, _, _, _, offset, length in sections:
        name = cubin[names + name_at:cubin.index(b"\0", names + name_at)]
        if name.startswith(b".text."):
            found[name.removeprefix(b".text.").decode()] = [
                struct.unpack_from("<H", cubin, at)[0] & 0xFFF for at in range(offset, offset + length, 16)]
    return found


def reads_too_early(cubin: bytes) -> list[str]:
    """The kernels in which memory is touched before the wait for the kernel ahead, or which do not wait."""
    return [name for name, codes in operations(cubin).items()
            if WAIT not in codes or MEMORY & set(codes[:codes.index(WAIT)])]
