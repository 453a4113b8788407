"""A plan of one launch as a builtin function of Python's, in machine code: kernels_src/call.ll.

The same in Python takes a third of a call's own time: frames, numbers as objects, packing. LLVM, which
compiles kernels for a CPU as well, takes 40 ms for it once a process, most of them its import, so a
plan begins in Python and is `settled` after a hundred calls (`dispatch.settle`).
"""

from __future__ import annotations

import ast
import ctypes
import functools
import logging
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.random import Taking
from fusionrt.runtime import arrivals, llvm, source

OUTPUTS = 8
SEED, OFFSET, STATE = "rng[0]", "rng[1]", "state"  # of parameters; only captures have a state on the device
ARRIVED = "counter({device}, at)"  # where blocks count themselves, which belongs to a stream
_FASTCALL = 0x0080  # METH_FASTCALL
_OF_PYTHON = re.compile(r"^declare .* @(Py\w+)", re.MULTILINE)
_FIELD = re.compile(r"\d+s|\d*x|[a-zA-Z]")  # of a format of `struct`
_log = logging.getLogger(__name__)


def _struct(title: str, **fields: Any) -> type[ctypes.Structure]:
    return type(title, (ctypes.Structure,), {"_fields_": list(fields.items())})


_object, _address, _u32, _u64 = ctypes.py_object, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
_Input = _struct("Input", argument=_u32, place=_u32)
_Number = _struct("Number", argument=_u32, place=_u32, is_double=_u64)
_Output = _struct("Output", shape=_object, strides=_object, dtype=_object, place=_u64)
_Plan = _struct(
    "Plan", general=_object, data_ptr=_address, empty=_object, stream=_object, device=_object,
    launch=_address, is_capturing=_address, kernel=_address, grid=_u32, layers=_u32, block=_u32, shared=_u32,
    n_arguments=_u64, n_inputs=_u64, n_numbers=_u64, n_outputs=_u64, inputs=_address, numbers=_address,
    outputs=_address, parameters=_address, n_bytes=_u64, n_returned=_u64,
    acquire=_object, release=_object, get_offset=_object, set_offset=_object, initial_seed=_object, step=_u64,
    seed_place=_u64, offset_place=_u64, has_stream=_u64, own_stream=_u64)
_MethodDef = _struct("MethodDef", name=ctypes.c_char_p, function=_address, flags=ctypes.c_int,
                     doc=ctypes.c_char_p)


class Allocated(NamedTuple):
    """An output, as `empty_strided` makes it."""

    name: str
    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype


class Launched(NamedTuple):
    """A kernel, and its parameters as Python text: numbers, the addresses of inputs (p_ and the argument's
    name) and of outputs, arguments that are numbers."""

    kernel: int
    grid: int
    layers: int
    block: int
    shared: int
    params: source.Params
    packed: Sequence[str]


class Plan(NamedTuple):
    """`general` does the same in Python, and whatever else there is to do."""

    general: Callable[..., Any]
    arguments: Sequence[str]
    outputs: Sequence[Allocated]  # of which those after the first `returned` are for the kernel alone
    returned: int
    launched: Launched
    device: int
    functions: Mapping[str, Any]  # empty, stream
    random: Taking | None = None  # for what is known as rng


def settled(plan: Plan) -> Callable[..., Any]:
    """The plan in machine code; its general callable where that cannot be."""
    try:
        inputs, numbers, places, known = _parameters(plan)
        return _builtin(plan, inputs, numbers, places, known)
    except Exception as error:  # of LLVM, of a Python that lacks a function: none may fail a call
        _log.debug("a plan stays in Python: %s", error)
        return plan.general


def _parameters(plan: Plan) -> tuple[list[Any], list[Any], dict[str, int], bytes]:
    """Inputs, numbers, the places of outputs' addresses and of random numbers; the parameters with zeros for
    all these."""
    params, packed = plan.launched.params, plan.launched.packed
    inputs, numbers, places, known = [], [], {}, []
    arguments = {name: k for k, name in enumerate(plan.arguments)}
    outputs = {f"{o.name}.data_ptr()": o.name for o in plan.outputs}
    for text, (code, place) in zip(packed, _fields(params.packer.format), strict=True):
        if text.removeprefix("p_") in arguments and text.startswith("p_"):
            inputs.append(_Input(arguments[text.removeprefix("p_")], place))
        elif text in arguments and code in "fd":
            numbers.append(_Number(arguments[text], place, code == "d"))
        elif text in outputs and outputs[text] not in places:
            places[outputs[text]] = place
        elif plan.random is not None and text in (SEED, OFFSET):
            places[text] = place
        elif text == ARRIVED.format(device=plan.device):
            known.append(arrivals.of_stream(plan.device, _stream(plan)))
            continue
        elif plan.random is None or text != STATE:
            known.append(ast.literal_eval(text))
            continue
        known.append(0)
    return inputs, numbers, places, params.packer.pack(*params.converted(*known))


def _stream(plan: Plan) -> int:
    current: int = plan.functions["stream"](plan.device)
    return current


def _fields(format: str) -> list[tuple[str, int]]:
    """Of each value its code and its place."""
    found, place = [], 0
    for code in _FIELD.findall(format):
        if not code.endswith("x"):
            found.append((code, place))
        place += struct.calcsize("=" + code)
    return found


def _builtin(plan: Plan, inputs: Sequence[Any], numbers: Sequence[Any], places: Mapping[str, int],
             known: bytes) -> Callable[..., Any]:
    if len(plan.outputs) > OUTPUTS:
        raise ValueError(f"{len(plan.outputs)} outputs")
    launched = plan.launched
    outputs = [_Output(tuple(o.shape), tuple(o.strides), o.dtype, places[o.name]) for o in plan.outputs]
    tables = [(type(rows[0]) * len(rows))(*rows) if rows else None for rows in (inputs, numbers, outputs)]
    parameters = ctypes.create_string_buffer(known, len(known))
    made = _Plan(plan.general, _data_ptr(), plan.functions["empty"], plan.functions["stream"], plan.device,
                 *_driver(), launched.kernel, launched.grid, launched.layers, launched.block, launched.shared,
                 len(plan.arguments), len(inputs), len(numbers), len(outputs),
                 *(table and ctypes.addressof(table) for table in tables), ctypes.addressof(parameters),
                 len(known), plan.returned)
    if plan.random is not None:
        for name, value in plan.random._asdict().items():
            setattr(made, name, value)
        made.seed_place, made.offset_place = places[SEED], places[OFFSET]
    made.has_stream, made.own_stream = ARRIVED.format(device=plan.device) in launched.packed, _stream(plan)
    method, _ = _method()
    owned = ctypes.addressof(made), made, *tables, parameters
    create = ctypes.pythonapi.PyCFunction_NewEx
    create.restype, create.argtypes = _object, (_address, _object, _address)
    function: Callable[..., Any] = create(ctypes.addressof(method), owned, None)
    return function


def _data_ptr() -> int:
    """`void *data_ptr(PyObject *)`, which Inductor's own machine code calls."""
    from torch._C._dynamo import guards
    address: int = guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    return address


def _driver() -> tuple[int | None, int | None]:
    driver = ctypes.CDLL("libcuda.so.1")
    functions = driver.cuLaunchKernel, driver.cuStreamIsCapturing
    launch, is_capturing = (ctypes.cast(function, _address).value for function in functions)
    return launch, is_capturing


@functools.cache
def _method() -> tuple[Any, Any]:
    """What Python needs to know of the machine code, and what owns that."""
    binding = llvm.library()
    text = source.template("call.ll")
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), llvm.machine())
    missing = [name for name in _OF_PYTHON.findall(text) if binding.address_of_symbol(name) is None]
    if missing:  # to go on would end the process
        raise RuntimeError(f"this Python does not export {', '.join(missing)}")
    engine.finalize_object()
    return _MethodDef(b"fusionrt_call", engine.get_function_address("call"), _FASTCALL, None), engine
