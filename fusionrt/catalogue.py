"""The registry of public ops: what the README table, the tests, the benchmarks and warmup go through.

Ops are lazy: the module that declares one is imported when someone asks for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping
from types import ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from fusionrt.array import taking_arrays
from fusionrt.dispatch import Usual, front, shortcut
from fusionrt.fusion import Fused, fuse_named, on_device
from fusionrt.op_names import MODULE, load
from fusionrt.sites import Sites

# make(*shape) gives one tensor of the dtype in question: how an op's typical arguments are written.
Make = Callable[..., Any]
Example = Callable[[Make], tuple[Any, ...]]


P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Op(Protocol[P, R]):
    """A public op, with the arguments of its function."""

    __name__: str
    example: Example

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def cuda(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def cpu(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def reference(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class Catalogue(MutableMapping[str, "Op[..., Any]"]):
    """The ops by name: going through the names imports nothing, going through the ops all of them."""

    def __init__(self) -> None:
        self._declared: dict[str, Op[..., Any]] = {}

    def __getitem__(self, name: str) -> Op[..., Any]:
        if name not in self._declared and name in MODULE:
            load(name)
        return self._declared[name]

    def __setitem__(self, name: str, op: Op[..., Any]) -> None:
        self._declared[name] = op

    def __delitem__(self, name: str) -> None:
        del self._declared[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*MODULE, *self._declared]))

    def __len__(self) -> int:
        return len(MODULE.keys() | self._declared.keys())


OPS = Catalogue()
# In the docstrings of ops that take each element by itself.
ELEMENTWISE = """\
Shapes: tensors, arrays and numbers that broadcast, as in torch. Dtypes: float16 and bfloat16 (computed in
float32), float32, float64; the result has torch's promoted one. Raises ValueError where shapes do not
broadcast, devices differ or an option is none of those above, TypeError for what is neither tensor, array
nor number, or where no tensor is of floating point; they name the argument."""
# Of the examples: any size that is not small gives the same kernels. They differ, to be told apart.
ROWS, COLUMNS = 8192, 4096


def pointwise(function: Callable[..., Any] | None = None, /, *, example: Example | None = None) -> Any:
    """Declare an op by its formula. `example` is needed when some argument is not of full shape."""
    if function is None:
        return lambda f: pointwise(f, example=example)
    _say(ELEMENTWISE, function)
    return _register(fuse_named(function, function.__name__), example)


def public(*, example: Example, usual: Usual | None = None, asks: tuple[Sites, str] | None = None,
           arrays: str = "", numbers: Collection[str] | None = None, more: str = ""
           ) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare an op that chooses between fused functions, or checks its arguments first. `asks`: which sites
    it asks, and with which tensors. `arrays`: which arguments may be other arrays than torch's, beside which
    those of `numbers` may be NumPy's. `more` stands in its docstring as well, or else what that of its module
    says of shapes, dtypes and errors."""

    def declare(function: Callable[P, R]) -> Op[P, R]:
        _say(more or _of_all(sys.modules[function.__module__]), function)
        general = taking_arrays(function, arrays, numbers) if arrays else function
        made = cast(Any, shortcut(general, usual) if usual else front(general, *asks) if asks else general)
        made.cuda, made.cpu = (on_device(made, function.__name__, d) for d in ("CUDA", "CPU"))
        return cast("Op[P, R]", _register(made, example))

    return declare


def _of_all(module: ModuleType) -> str:
    """What a module says of all its ops: the part with their dtypes."""
    parts = (inspect.getdoc(module) or "").split("\n\n")
    return next((part for part in parts if "Dtypes:" in part), "")


def _say(more: str, function: Callable[..., Any]) -> None:
    """In front of the example, which ends a docstring; Python leaves these out if told to (-OO)."""
    said = inspect.getdoc(function)
    if more and said:
        text, *example = said.rsplit("\n\n    ", 1)
        function.__doc__ = "\n\n".join([text, more, *(f"    {line}" for line in example)])


def _register(function: Any, example: Example | None) -> Any:
    name = function.__name__
    if example is None:
        def example(make: Make) -> tuple[Any, ...]:
            required = [p.default is p.empty for p in inspect.signature(function).parameters.values()]
            return tuple(make(ROWS, COLUMNS) for _ in range(sum(required)))

    def reference(*args: Any, **kwargs: Any) -> Any:
        from fusionrt import reference as formulas
        return getattr(formulas, name)(*args, **kwargs)

    reference.__name__, reference.__module__ = f"{name}.reference", function.__module__
    reference.__qualname__ = f"{name}.reference"
    reference.__doc__ = f"The unfused torch formula of {name}."
    function.example, function.reference = example, reference
    OPS[name] = function
    return function


__all__ = ["OPS", "Fused", "Op", "pointwise", "public"]
