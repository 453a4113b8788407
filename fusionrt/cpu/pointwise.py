"""Numba text for a pointwise problem, and the callable that runs it on CPU tensors.

A kernel walks a linear range of the domain, one run of the innermost dimension at a time, so that
the inner loop has constant strides (0, 1 or a variable) and vectorises. One that sums, draws random
numbers or fetches what lies apart takes a range of tasks instead: parts of the domain with buffers of their
own, whose sums go to arrays of their own, in float64. Their number follows from the shape alone, so results
do as well; the number after the last says: add the sums up.

Trap: LLVM's vectors have as many elements as the widest type in a loop allows. What is computed in
float32 is therefore added up in float32 first (of a block, of some rows), or goes to a buffer, and another
loop adds that to float64 sums.

Of rows that lie across memory (`across`) each root is a sum, a maximum or a mean, and the output what is
added up or compared for it. For a mean that is done in float64 throughout: that of equal elements is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from fusionrt.cpu import compiler, team, threads
from fusionrt.cpu.calling import Arguments, PlanText, pays
from fusionrt.cpu.lines import coordinates, indented, of_several
from fusionrt.cpu.signature import Signature, extents, function, known, pointers
from fusionrt.dtypes import element_of
from fusionrt.expr import Expr
from fusionrt.graph import emit, toposort
from fusionrt.problem import Operand, Output, Problem
from fusionrt.texts import Texts

_texts = Texts()
BLOCK = 1024     # elements a random or summed run is cut into: two blocks of random numbers
SHORT_ROW = 16   # elements, of which a buffer has some more than a run
PLACES = 4       # rows whose columns are read together
BUFFER = (BLOCK + 16) * 8  # bytes
SUM_TASKS, TASKS = 32, 256  # at most, with and without sums
CHEAP = 4        # operations that take no longer than storing their result and fetching it again
ROWS = 8         # that are added up in float32 before they are in float64


def generate(problem: Problem) -> str:
    """The kernel's text. Of reduced outputs the pointers are those of the tasks' sums."""
    return _texts.text(_form(problem), lambda: _written(problem))


def _form(problem: Problem) -> tuple[Any, ...]:
    """All that the text depends on."""
    sizes = (problem.sizes[0] > BLOCK,) * len(problem.sizes)
    inputs, outputs = (tuple((o.name, o.dtype, *(min(s, 2) for s in o.strides)) for o in some)
                       for some in (problem.inputs, problem.outputs))
    named = (*(o.name for o in _apart(problem)), "repeated", *(o.name for o in repeated(problem)))
    rest = problem._replace(sizes=sizes, inputs=(), outputs=(), row_size=0, abreast=min(problem.abreast, 2))
    return *rest, *inputs, *outputs, *named


def _written(problem: Problem) -> str:
    inputs, outputs, n_dims = problem.inputs, problem.outputs, len(problem.sizes)
    buffered, means = buffered_sums(problem), outputs_of(problem, ("moment_mean",))
    summed = problem.sums
    operands, scratch = _strided(problem), _scratch(problem)
    places = Signature(pointers((*inputs, *outputs), scratch), tuple(_integers(problem)),
                       problem.scalars).places()
    lines = [*known(places, problem.sizes, operands, problem.scalars),
             *[f"columns = n0 // {places['abreast']}"] * (problem.abreast > 1)]
    again, alike = repeated(problem), _alike(problem)
    near = [*fetched(problem), *again, *alike]
    lines += [f"{o.name}_data = {element_of(o.dtype)}_at({places[o.name]})"
              for o in (*inputs, *outputs) if o not in summed]
    if _has_tasks(problem):
        places |= {name: f"{places[name]} + task * {BUFFER}" for name in scratch}
    own = [f"buffer_{o.name} = {problem.acc}_at({places[f'buffer_{o.name}']})" for o in buffered]
    own += [f"near_{o.name} = {element_of(o.dtype)}_at({places[f'near_{o.name}']})" for o in near]
    own += [line for o in again for line in (
        f"for j in range({BLOCK} + n0):", f"    near_{o.name}[j] = {o.name}_data[j % n0]")]
    own += [line for o in alike for line in (
        "for j in range(n0):", f"    near_{o.name}[j] = {o.name}_data[j % columns]")]
    own += [f"{name} = {dtype}_at({places[s]})" for s in problem.streams
            for name, dtype in ((f"bits_{s}", "uint16"), (f"words_{s}", "uint64"))]
    body = [*_coordinates(problem), *(
        [f"{o.name}_base = {'c0' if o in again else 'i'}" for o in operands] if again else bases(operands))]
    body += _draws(problem, places) if problem.streams else []
    body += [f"{o.name} = load_{o.dtype}({o.name}_data[{o.name}_base])" for o in inputs if not o.strides[0]]
    walk = [*own, *_walk(problem, [*body, *inner_run(problem, summed, buffered, means)], buffered)]
    has_tasks = _has_tasks(problem)
    count = " * ".join(f"n{d}" for d in range(1 if _in_columns(problem) else 0, n_dims)) or "1"
    lines += in_tasks(problem, places, count, walk) if has_tasks else walk
    return function(lines, *(("first", "last") if has_tasks else ()))


def _integers(problem: Problem, tasks: int = 0) -> dict[str, int]:
    return extents(problem.sizes, _strided(problem)) | {
        "seed": 0, "offset": 0, "tasks": tasks, "abreast": problem.abreast}


def _strided(problem: Problem) -> list[Operand]:
    return [*problem.inputs, *problem.sums, *_apart(problem)]


def _scratch(problem: Problem) -> list[str]:
    near = (*fetched(problem), *repeated(problem), *_alike(problem))
    return [*problem.streams, *(f"buffer_{o.name}" for o in buffered_sums(problem)),
            *(f"near_{o.name}" for o in near)]


def _has_tasks(problem: Problem) -> bool:
    return bool(problem.streams or fetched(problem) or repeated(problem)) or any(problem.reduced)


def _in_columns(problem: Problem) -> bool:
    """Whether blocks of columns are walked from the first to the last of a task's rows, so that the sums of
    columns stay in the cache; else rows one after the other."""
    return not problem.streams and any(
        reduced and o.strides[0] for o, reduced in zip(problem.outputs, problem.reduced, strict=True))


def _coordinates(problem: Problem) -> list[str]:
    """Of the element at which a run of the innermost dimension begins, and how long that is."""
    if repeated(problem):
        return ["c0 = i % n0", f"length = min(stop - i, {BLOCK})"]
    if _in_columns(problem):
        lines = ["i = row * n0 + c0"]
    else:
        lines = ["row = i // n0", "c0 = i - row * n0", "length = min(n0 - c0, stop - i)"]
        if problem.streams or buffered_sums(problem) or fetched(problem) or _inner_sums(problem):
            lines.append(f"length = min(length, {BLOCK})")
    return [*lines, *coordinates("row", range(1, len(problem.sizes)))]


def _draws(problem: Problem, places: Mapping[str, str]) -> list[str]:
    fills = [f"    fill_random(words_{s}, drawn // 512, n_blocks, uint64_of({places['seed']}), "
             f"uint64_of({places['offset']} + {s.removeprefix('random')}))" for s in problem.streams]
    return ["if i + length > drawn_end:", "    drawn = i - (i & 511)",
            "    n_blocks = 2 if (i & 511) + length <= 1024 else 3", *fills,
            "    drawn_end = drawn + 512 * n_blocks"]


def _walk(problem: Problem, body: Sequence[str], buffered: Sequence[Operand]) -> list[str]:
    """From `start` to `stop`: elements, or rows where blocks of columns are walked."""
    if _in_columns(problem):
        rows = walk_down(body, [o for o in buffered if gathers(problem, o)], outputs_of(problem, TOPS))
        if goes_together(problem) and all(gathers(problem, o) for o in problem.outputs):
            at = [f"{o.name}_base = c0" for o in problem.outputs]
            rows = [*at, *walk_down_together(problem, _coordinates(problem), body)]
        return [f"for c0 in range(0, n0, {BLOCK}):", f"    length = min(n0 - c0, {BLOCK})", *indented(rows)]
    drawn = ["drawn = 0", "drawn_end = start"] if problem.streams else []
    return ["i = start", *drawn, "while i < stop:", *indented([*body, "i += length"])]


def in_tasks(problem: Problem, places: Mapping[str, str], count: str, walk: Sequence[str]) -> list[str]:
    """A loop over tasks, each with sums of its own, and from `start` to `stop` of `count`; or the addition of
    all the sums."""
    tasks, tops, sums, empty, joined = places["tasks"], outputs_of(problem, TOPS), [], [], []
    for o in problem.sums:
        kept = " * ".join(f"n{d}" for d, stride in enumerate(o.strides) if stride) or "1"
        sums.append(f"{o.name}_data = float64_at({places[o.name]} + task * {kept} * 8)")
        here, there = f"{o.name}_data[j]", f"{o.name}_other[j]"
        empty += [f"for j in range({kept}):", f"    {here} = float64_of({'-inf' if o in tops else '0'})"]
        joined += [f"{o.name}_data = float64_at({places[o.name]})", f"for other in range(1, {tasks}):",
                   f"    {o.name}_other = float64_at({places[o.name]} + other * {kept} * 8)",
                   f"    for j in range({kept}):",
                   f"        {_add(here, there, o in tops)}"]
        if problem.abreast > 1:
            joined += [f"for j in range(columns, {kept}):",
                       f"    {_add(f'{o.name}_data[j % columns]', here, o in tops)}"]
    return ["for task in range(first, last):", f"    if task == {tasks}:", *indented(indented(joined)),
            "        return", *indented(sums), *indented(empty), f"    start = {count} * task // {tasks}",
            f"    stop = {count} * (task + 1) // {tasks}", *indented(walk)]


def gathers(problem: Problem, output: Operand) -> bool:
    """Whether a block's rows all go to the same sums, so that several can be added up in its buffer."""
    return _in_columns(problem) and output.strides[0] != 0 and not any(output.strides[1:])


def walk_down(body: Sequence[str], gathered: Sequence[Operand], tops: Container[Operand]) -> list[str]:
    """Some columns of a task's rows, a few of which the buffers gather before they are added to the sums."""
    if not gathered:
        return ["for row in range(start, stop):", *indented(body)]
    empty, added = [], []
    for o in gathered:
        empty.append(f"    buffer_{o.name}[j] = acc_t({'-inf' if o in tops else '0'})")
        added.append(f"    {_add(f'{o.name}_data[c0 + j]', f'buffer_{o.name}[j]', o in tops)}")
    group = ["for j in range(length):", *empty, f"for row in range(top_row, min(top_row + {ROWS}, stop)):",
             *indented(body), "for j in range(length):", *added]
    return [f"for top_row in range(start, stop, {ROWS}):", *indented(group)]


def goes_together(problem: Problem) -> bool:
    """Whether rows are read PLACES at a time. Several operands, of which a core has enough on its way, only
    where blocks of columns are parts of rows: whole rows one after the other come twice as fast."""
    alone = sum(all(o.strides) for o in problem.inputs) < 2
    return (alone or problem.sizes[0] > BLOCK) and not buffered_sums(problem) and not fetched(problem)


def walk_down_together(problem: Problem, place: Sequence[str], body: Sequence[str], first: str = "start",
                       last: str = "stop") -> list[str]:
    """Sums of columns, rows PLACES at a time, whose values are joined in registers; the rest of them, less
    than that many, by `body`. `place`: the coordinates of `row`."""
    tops, means = outputs_of(problem, TOPS), outputs_of(problem, ("moment_mean",))
    alike = _alike(problem)  # of which memory has one row, and a buffer as many as there are side by side
    each = [f"{o.name} = load_{o.dtype}({f'near_{o.name}' if o in alike else f'{o.name}_data'}"
            f"[{o.name}_base + {step(o)}])" for o in problem.inputs if o.strides[0]]
    statements, results = emit(_values(problem), "{} = {}", stem="v")
    each += statements
    head = [*place, *entering(problem.inputs)]
    of_each = of_several([*head, *each], PLACES)

    def of_all(lines: Sequence[str]) -> list[str]:
        return [line for of_row in zip(*map(of_each, lines), strict=True) for line in of_row]

    joined = []
    for o, value in zip(problem.outputs, results, strict=True):
        values = of_all([f"float64_of({value})" if o in means else f"acc_t({value})"])
        one = (functools.reduce(lambda a, b: f"larger_or_nan({a}, {b})", values) if o in tops else
               " + ".join(values))
        joined.append(_add(f"{o.name}_data[{o.name}_base + {step(o)}]", one, o in tops))
    group = [*(f"row_{k} = row + {k}" for k in range(PLACES)), *of_all(head), "for j in range(length):",
             *indented([*of_all(each), *joined])]
    return [f"for row in range({first}, {last} - {PLACES - 1}, {PLACES}):", *indented(group),
            f"for row in range({first} + ({last} - {first}) // {PLACES} * {PLACES}, {last}):",
            *indented(body)]


def bases(operands: Sequence[Operand]) -> list[str]:
    """Where the run begins in each."""
    return [f"{o.name}_base = {_offset(o)}" for o in operands]


def entering(inputs: Sequence[Operand]) -> list[str]:
    """Where the run begins in each, and those that are the same for all of it."""
    return [*bases(inputs), *(f"{o.name} = load_{o.dtype}({o.name}_data[{o.name}_base])"
                              for o in inputs if not o.strides[0])]


def _offset(operand: Operand) -> str:
    terms = [f"c{d}" + ("" if stride == 1 else f" * {operand.name}_s{d}")
             for d, stride in enumerate(operand.strides) if stride]
    return " + ".join(terms) or "0"


def _add(place: str, value: str, is_top: bool) -> str:
    return f"{place} = larger_or_nan({place}, float64_of({value}))" if is_top else (
        f"{place} += float64_of({value})")


TOPS = ("row_max", "row_top")


def outputs_of(problem: Problem, ops: Container[str]) -> list[Operand]:
    """The outputs whose roots are such."""
    return [o for o, root in zip(problem.outputs, problem.roots, strict=True) if root.op in ops]


def _apart(problem: Problem) -> list[Operand]:
    """Full outputs that do not lie as the domain is walked: parts of something wider."""
    return [o for o in problem.full_outputs if any(s != flat and n != 1 for s, flat, n in zip(
        o.strides, problem.domain.flat, problem.sizes, strict=True))]


def _values(problem: Problem) -> list[Expr]:
    """What is stored, added up or compared."""
    return [a for root in problem.roots for a in (root.args if problem.across else [root])
            if isinstance(a, Expr)]


def _inner_sums(problem: Problem) -> list[Operand]:
    """Sums over the inner dimension."""
    tops = outputs_of(problem, TOPS)
    return [o for o in problem.sums if not o.strides[0] and o not in tops]


def buffered_sums(problem: Problem) -> list[Operand]:
    """Sums of columns whose summands are collected in a buffer: of what takes longer to compute than to
    store."""
    means = outputs_of(problem, ("moment_mean",))
    costly = len([n for n in toposort(_values(problem)) if n.args and isinstance(n.args[0], Expr)]) > CHEAP
    return [o for o in problem.sums
            if o.strides[0] and costly and problem.acc == "float32" and o not in means]


def fetched(problem: Problem) -> list[Operand]:
    """Inputs whose elements are no neighbours, of which LLVM makes no vectors, or slow ones: put into a
    buffer first, where the arithmetic takes longer than that, or sums want vectors."""
    costly = bool(_inner_sums(problem)) or any(n.primitive.is_costly for n in toposort(_values(problem)))
    return [o for o in problem.inputs if o.strides[0] > 1] if costly else []


def repeated(problem: Problem) -> list[Operand]:
    """Inputs that repeat from row to row of very few elements, as a bias does: a buffer has them as often as
    there is room for, so that a run goes over many rows. (Of few elements in all, not worth a kernel.)"""
    flat, sizes = problem.domain.flat, problem.sizes
    short = len(sizes) == 2 and sizes[0] <= SHORT_ROW and problem.domain.numel >= team.SERIAL_BELOW
    if not short or problem.streams or problem.across or any(problem.reduced):
        return []
    found = [o for o in problem.inputs if o.strides == (1, 0)]
    others = [o for o in (*problem.inputs, *problem.outputs) if o not in found]
    return found if all(o.strides == flat for o in others) else []


def _alike(problem: Problem) -> list[Operand]:
    """Inputs of rows side by side that repeat from one to the next."""
    return [o for o in problem.inputs if problem.abreast > 1 and o.strides == (1, 0)]


def inner_run(problem: Problem, summed: Sequence[Operand], buffered: Sequence[Operand],
              means: Container[Operand]) -> list[str]:
    """A run of the innermost dimension."""
    tops, apart, near = outputs_of(problem, TOPS), _apart(problem), fetched(problem)
    places = {o: f"{o.name}_data[{o.name}_base + {step(o)}]" for o in problem.inputs if o.strides[0]}
    at_hand = (places | {o: f"near_{o.name}[j]" for o in near} |
               {o: f"near_{o.name}[{o.name}_base + j]" for o in (*repeated(problem), *_alike(problem))})
    lines = [f"{o.name} = load_{o.dtype}({place})" for o, place in at_hand.items()]
    lines += [f"{s} = bits_{s}[i - drawn + j]" for s in problem.streams]
    statements, results = emit(_values(problem), "{} = {}")
    lines += statements
    before = [line for o in near
              for line in ("for j in range(length):", f"    near_{o.name}[j] = {places[o]}")]
    after, inner = [], _inner_sums(problem)
    taken = dict(problem.taken)
    for o, value in zip(problem.outputs, results, strict=True):
        place = f"{o.name}_data[{o.name}_base" + (f" + {step(o)}]" if o.strides[0] else "]")
        buffer, is_top = f"buffer_{o.name}[j]", o in tops
        if o not in summed:
            # By the name of the operand whose memory it takes: LLVM sees one memory, and vectorises.
            name = taken.get(o.name, o.name)
            at = f"{name}_base + {step(o)}" if o in apart or o.name in taken else "i + j"
            lines.append(f"{name}_data[{at}] = store_{o.dtype}(acc_t({value}))")
        elif o in buffered and gathers(problem, o):
            lines.append(f"{buffer} = " + (f"larger_or_nan({buffer}, acc_t({value}))" if is_top else
                                           f"{buffer} + acc_t({value})"))
        elif o in buffered:
            lines.append(f"{buffer} = acc_t({value})")
            after += ["for j in range(length):", f"    {_add(place, buffer, is_top)}"]
        elif o.strides[0]:
            lines.append(_add(place, value, is_top))
        elif o in inner:
            number = "float64_of" if o in means else "acc_t"
            before.append(f"sum_{o.name} = {number}(0)")
            lines.append(f"sum_{o.name} = plus(sum_{o.name}, {number}({value}))")
            after.append(_add(place, f"sum_{o.name}", False))
        else:
            before += [f"top_{o.name} = -acc_t(inf)", f"bits_{o.name} = no_bits(acc_t(0))"]
            lines += [f"top_{o.name} = larger(top_{o.name}, {value})",
                      f"bits_{o.name} = largest_bits(bits_{o.name}, {value})"]
            after.append(_add(place, f"maximum_found(top_{o.name}, bits_{o.name})", True))
    return [*before, "for j in range(length):", *indented(lines), *after]


def step(operand: Operand) -> str:
    stride = operand.strides[0]  # 0 where there is one element
    return f"j * {operand.name}_s0" if stride > 1 else "j" if stride else "0"


def build(problem: Problem, results: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """A callable of the operator's arguments (and seed) that allocates and computes."""
    run = compiler.function(generate(problem), problem.accuracy, problem.name)
    count = problem.domain.numel
    summed = problem.summed
    sums_of = {k: problem.outputs[k].numel(problem.sizes) for k in summed}
    # A task per part of the domain, never so many that their sums take long beside the domain itself.
    most = min(SUM_TASKS, count // (32 * max(sums_of.values())) + 1) if summed else TASKS
    tasks = max(1, min(most, count // team.SERIAL_BELOW))
    scratch = _scratch(problem)
    text = PlanText(problem, results, run, Arguments(
        pointers((*problem.inputs, *problem.outputs), scratch), _integers(problem, tasks), problem.scalars))
    if problem.streams:
        text.draw()
    if _has_tasks(problem):
        text.divide(tasks, tasks > 1 and pays(count), 1)
        text.launch_tasks(tasks, sums_of, scratch, BUFFER, joins=problem.abreast > 1)
    else:
        text.divide(count, pays(count), threads.GRAIN)
        text.launch()
    return text.compile(n_args, lambda: build(problem, results, n_args))
