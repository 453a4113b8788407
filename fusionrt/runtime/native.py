"""A plan of launches as a builtin function of Python's, in machine code: kernels_src/call.ll.

The same in Python takes a third of a call's own time: frames, numbers as objects, packing. LLVM, which
compiles kernels for a CPU as well, takes 40 ms for it once a process, most of them its import, so a
plan begins in Python and settles after many calls (`settling`). A CPU's plans are made so too, with
something else in the driver's place (`cpu/settled.py`).
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
from collections.abc import Callable
from typing import Any

from fusionrt.runtime import arrivals, binding, llvm, scratch
from fusionrt.runtime.plan import ARRIVED, RANDOM, Launched, Plan

OUTPUTS = 8
MOST_BYTES = 4096  # of the parameters of all launches
SEED, OFFSET, STATE = f"{RANDOM}[0]", f"{RANDOM}[1]", "state"  # of parameters
_ADDRESS = re.compile(r"(?:p_(\w+)|(\w+)\.data_ptr\(\))(?: \+ (\d+))?")
_log = logging.getLogger(__name__)


def _struct(title: str, **fields: Any) -> type[ctypes.Structure]:
    return type(title, (ctypes.Structure,), {"_fields_": list(fields.items())})


_object, _address = ctypes.py_object, ctypes.c_void_p
_u32, _u64, _i64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
_Input = _struct("Input", argument=_u32, place=_u32)
_Number = _struct("Number", argument=_u32, place=_u32, is_double=_u64)
_Output = _struct("Output", shape=_object, strides=_object, dtype=_object, position=_i64)
_Place = _struct("Place", value=_u32, place=_u32, added=_u64)
_Launch = _struct("Launch", kernel=_address, attributes=_address, n_attributes=_u32, grid=_u32, layers=_u32,
                  block=_u32, shared=_u32, parameters=_u32)
_Plan = _struct(
    "Plan", general=_object, data_ptr=_address, empty=_object, stream=_object, device=_object,
    launch=_address, is_capturing=_address, n_arguments=_u64, n_inputs=_u64, n_numbers=_u64, n_outputs=_u64,
    n_places=_u64, n_launches=_u64, inputs=_address, numbers=_address, outputs=_address, places=_address,
    launches=_address, parameters=_address, n_bytes=_u64, n_returned=_u64, acquire=_object, release=_object,
    get_offset=_object, set_offset=_object, initial_seed=_object, step=_u64, has_stream=_u64,
    own_stream=_u64, asked=_object, answer=_u64, random=_i64, none=_object)


class _Parameters:
    """Of all launches: their bytes with zeros for what each call finds out, and where that stands. What is
    for the kernels alone has its place in the thread's scratch, if that is large enough."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.known = plan, bytearray()
        alone = {k: math.prod(o.shape) * o.dtype.itemsize for k, o in enumerate(plan.outputs)
                 if o.name not in plan.returned and "scratch" in plan.functions}
        places = scratch.offsets(alone)
        self.has_stream = bool(places)
        begin = plan.functions["scratch"](plan.device, _stream(plan), plan.thread) if places else 0
        self.scratch = {k: begin + place for k, place in places.items()}
        self.outputs = [k for k in range(len(plan.outputs)) if k not in self.scratch]  # of each call
        self.begins: list[int] = []
        self.inputs: list[Any] = []
        self.numbers: list[Any] = []
        self.places: list[Any] = []
        for launched in plan.launched:
            self.known += bytes(-len(self.known) % 64)
            self.begins.append(len(self.known))
            fields = zip(launched.packed, launched.params.places(), strict=True)
            values = [self._value(value, code, self.begins[-1] + place, launched)
                      if isinstance(value, str) else value for value, (code, place) in fields]
            self.known += launched.params.packer.pack(*launched.params.converted(*values))
        if len(self.known) > MOST_BYTES:
            raise ValueError(f"{len(self.known)} bytes of parameters")

    def _value(self, text: str, code: str, place: int, launched: Launched) -> int:
        plan = self.plan
        arguments = {name: k for k, name in enumerate(plan.arguments)}
        outputs = {o.name: k for k, o in enumerate(plan.outputs[:launched.n_allocated])}
        draws = plan.random is not None or RANDOM in arguments
        found = _ADDRESS.fullmatch(text)
        name, added = (found[1] or found[2], int(found[3] or 0)) if found else ("", 0)
        if name in outputs and outputs[name] in self.scratch:
            return self.scratch[outputs[name]] + added
        if name in outputs:
            self.places.append(_Place(self.outputs.index(outputs[name]), place, added))
        elif name in arguments and not added:
            self.inputs.append(_Input(arguments[name], place))
        elif text in arguments and code in "fd":
            self.numbers.append(_Number(arguments[text], place, code == "d"))
        elif draws and text in (SEED, OFFSET):
            self.places.append(_Place(OUTPUTS + (text == OFFSET), place, 0))
        elif text == ARRIVED.format(device=plan.device):
            self.has_stream = True
            return arrivals.of_stream(plan.device, _stream(plan))
        elif not (draws and text == STATE):
            raise ValueError(f"a parameter {text}")
        return 0


def machine_code(plan: Plan) -> Callable[..., Any]:
    """The plan in machine code; its general callable where that cannot be."""
    try:
        return _builtin(plan, _Parameters(plan))
    except Exception as error:  # of LLVM, of a Python that lacks a function: none may fail a call
        _log.debug("a plan stays in Python: %s", error)
        return plan.general


def _stream(plan: Plan) -> int:
    current: int = plan.functions["stream"](plan.device) if "stream" in plan.functions else 0
    return current


def _builtin(plan: Plan, parameters: _Parameters) -> Callable[..., Any]:
    if len(parameters.outputs) > OUTPUTS:
        raise ValueError(f"{len(parameters.outputs)} outputs")
    position = {name: k for k, name in enumerate(plan.returned)}
    outputs = [_Output(tuple(o.shape), tuple(o.strides), o.dtype, position.get(o.name, -1))
               for o in (plan.outputs[k] for k in parameters.outputs)]
    launches = [_Launch(of.kernel, of.attribute and ctypes.addressof(of.attribute), of.attribute is not None,
                        of.grid, of.layers, of.block, of.shared, begin)
                for of, begin in zip(plan.launched, parameters.begins, strict=True)]
    tables = [(type(rows[0]) * len(rows))(*rows) if rows else None for rows in (
        parameters.inputs, parameters.numbers, outputs, parameters.places, launches)]
    known = ctypes.create_string_buffer(bytes(parameters.known), len(parameters.known))
    made = _Plan(plan.general, _data_ptr(), plan.functions["empty"],
                 plan.functions.get("stream", _object()), plan.device,
                 *(plan.driver or _driver()), len(plan.arguments), *(len(table or ()) for table in tables),
                 *(table and ctypes.addressof(table) for table in tables), ctypes.addressof(known),
                 len(known), len(plan.returned))
    if plan.random is not None:
        for name, value in plan.random._asdict().items():
            setattr(made, name, value)
    if plan.still is not None:
        made.asked, made.answer = plan.still
    made.has_stream, made.own_stream = parameters.has_stream, _stream(plan)
    made.random, made.none = plan.arguments.index(RANDOM) if RANDOM in plan.arguments else -1, None
    return llvm.builtin("call", ctypes.addressof(made), made, *tables, known, plan.launched)


def _data_ptr() -> int:
    """`void *data_ptr(PyObject *)`, which Inductor's own machine code calls."""
    from torch._C._dynamo import guards
    address: int = guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    return address


def _driver() -> tuple[int | None, int | None]:
    driver = binding.libcuda()
    functions = driver.cuLaunchKernelEx, driver.cuStreamIsCapturing
    launch, is_capturing = (ctypes.cast(function, _address).value for function in functions)
    return launch, is_capturing
