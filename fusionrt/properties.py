"""A property that is found when it is first asked for. Python's own holds a lock of its class before 3.12;
what is found here calls a user's function, or a collection begins while it is, and either may wait for a
thread that asks for the same."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class kept_property(Generic[T]):
    """As functools.cached_property without a lock: of threads that ask at once each may find it."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find, self.__doc__ = find, find.__doc__

    @overload
    def __get__(self, of: None, kind: type) -> "kept_property[T]": ...
    @overload
    def __get__(self, of: object, kind: type) -> T: ...

    def __get__(self, of: object | None, kind: type) -> Any:
        if of is None:
            return self
        return vars(of).setdefault(self.find.__name__, self.find(of))
