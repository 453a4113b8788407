"""Vectors of a thread: how wide they are for a problem's operands, how many it has, the registers of one."""

from fusionrt.problem import MASK, Problem, of_problem
from fusionrt.runtime.access import access_mode
from fusionrt.runtime.geometry import is_flat
from fusionrt.runtime.source import ITEMSIZE

MISALIGNED_WORDS = 16  # of operands, where vectors are narrow


@of_problem
def vector_width(problem: Problem, alignment: int) -> int:
    """Elements a 16-byte vector of the widest flat operand holds, as far as pointers are aligned, to
    `alignment` bytes.

    A reduction over several rows needs rows of whole vectors as well.
    """
    width = pack_width(problem, alignment)
    if any(problem.reduced) and len(problem.sizes) > 1:
        while problem.sizes[0] * problem.abreast % width:
            width //= 2
    return width


def pack_width(problem: Problem, alignment: int) -> int:
    """The same whatever the rows."""
    operands = (*problem.inputs, *problem.outputs)
    # A vector of an operand that is wider still (a norm's weights) is several of 16 bytes.
    widest = _widest(problem) if alignment >= 16 else max(ITEMSIZE[o.dtype] for o in operands)
    return max(1, alignment // widest)


@of_problem
def _widest(problem: Problem) -> int:
    """Bytes of an element of the flat operands."""
    flat = [o for o in (*problem.inputs, *problem.outputs) if is_flat(o, problem.sizes)]
    return max([ITEMSIZE[o.dtype] for o in flat or problem.inputs], default=4)


@of_problem
def unroll(problem: Problem, width: int) -> int:
    """Vectors a thread: pairs where they share random numbers, two pairs (of one operand) if they
    share the keys as well; two vectors where one operand alone would keep too few bytes in flight and no
    other one has an offset for each element. Where that is a word (int8, float32 results), it is what is
    written that counts. Of misaligned operands as many as make 16 bytes, while registers last."""
    flat = [ITEMSIZE[o.dtype] for o in problem.inputs if o.dtype != MASK and is_flat(o, problem.sizes)]
    operands, words = len(flat), words_of(problem, width)
    vector = width * _widest(problem)
    if vector < 16:
        fitting = 1 << (max(1, MISALIGNED_WORDS // max(1, words)).bit_length() - 1)
        return min(16 // vector, fitting)
    crowded = (operands > 1 or gathers(problem, width) or len(problem.inputs) > 3 or words > 12
               or sum(flat) * width == 4)
    if width < 4 or (crowded and not problem.streams):
        return 1
    return 4 if problem.streams and operands == 1 else 2


def gathers(problem: Problem, width: int) -> bool:
    return any(access_mode(o, problem.sizes, width) == "gather" for o in problem.inputs)


def words_of(problem: Problem, width: int) -> int:
    """Registers that the operands of one vector take."""
    return sum(max(1, ITEMSIZE[o.dtype] * (width if o.strides[0] else 1) // 4) for o in problem.inputs)


def is_narrow(problem: Problem, width: int) -> bool:
    return width * max([ITEMSIZE[o.dtype] for o in problem.inputs], default=4) <= 4
