"""The text of a callable that does what a call needs: one straight line of allocations, packed parameters and
launches. What can be decided once it knows by name."""

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import random, settling
from fusionrt.problem import Output, Problem
from fusionrt.runtime import arrivals, scratch
from fusionrt.runtime import device as cuda
from fusionrt.runtime.plan import ARRIVED, RANDOM, Allocated, Launched, Plan
from fusionrt.runtime.source import Specialisation
from fusionrt.texts import Lines

Run = Callable[..., Any]
Values = dict[str, Any]  # of parameters: numbers, or text

try:  # Inductor's: half the cost of torch.empty_strided; on the current device, as we are
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided  # type: ignore
except ImportError:
    def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


class Call(NamedTuple):
    """What an operator knows of one kind of call."""

    problem: Problem
    results: Sequence[Output]
    n_arguments: int                  # of the operator: a0, a1, ...
    device: int


class PlanText(Lines):
    """The body of the callable, and what its names refer to."""

    def __init__(self, call: Call) -> None:
        driver = cuda.driver()
        super().__init__(empty=empty_strided, stream=cuda.raw_stream, scratch=scratch.piece,
                         launch=driver.launchKernel,
                         launch_together=driver.launchCooperativeKernel,
                         is_capturing=torch.cuda.is_current_stream_capturing)
        self.call = call
        if cuda.device_count() > 1:
            self.scope |= {"current": cuda.current, "elsewhere": _elsewhere}
        self.depends = cuda.has_dependent_launches(call.device)
        self.allocated: list[Allocated] = []
        self.launched: list[Launched] = []
        self.is_launches_alone = True  # beside allocations there is nothing more to do

    def allocate(self, name: str, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
                 ) -> None:
        self.allocated.append(Allocated(name, shape, strides, dtype))
        known = map(self.name, (tuple(shape), tuple(strides), dtype))
        self.lines.append(f"{name} = empty({', '.join(known)})")

    def arrived(self) -> dict[str, str]:
        """Where the blocks of a launch count themselves."""
        self.scope["counter"] = arrivals.counter
        return {"arrived": ARRIVED.format(device=self.call.device)}

    def launch(self, source: Specialisation, grid: int, block: int, values: Mapping[str, str | float],
               shared: int = 0, cluster: int = 1, layers: int = 1, together: bool = False,
               kernel: str = "", waits: bool = False) -> None:
        """Load a kernel, and write the lines that fill its parameters and launch it, with so many bytes of
        shared memory. `kernel`: which one of a translation unit with several. `waits`: for one of the same
        text, which lets it begin early, so that this pays outside of graphs too.

        The parameter buffer belongs to this text, and the text to one thread.
        """
        k = len(self.launched)
        if k == 0:  # 0, the default stream, is never captured
            self.lines.append(f"at = stream({self.call.device})")
            self.lines += ["captured = at and is_capturing()"] * self.depends
        packer = source.params.packer
        buffer = ctypes.create_string_buffer(packer.size)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.scope |= {f"pack{k}": packer.pack_into, f"buffer{k}": buffer, f"pointers{k}": pointers,
                       f"converted{k}": source.params.converted}
        function = cuda.function(source.text, source.entry, self.call.device, self.call.problem.name, kernel)
        cuda.allow(function, shared, cluster)
        each = [values.get(v, v) if isinstance(v, str) else v for field in source.values for v in field]
        packed = ", ".join(map(self.spelled, each))
        launched = Launched(function, grid, layers, block, shared, source.params, each, len(self.allocated))
        self.lines += [f"try: pack{k}(buffer{k}, 0, {packed})",
                       f"except OverflowError: pack{k}(buffer{k}, 0, *converted{k}({packed}))"]
        launch, last = ("launch_together", "") if together else ("launch", ", 0")
        kernel, grid_x, grid_y, block_x, bytes_shared, parameters = map(self.name, (
            function, grid, layers, block, shared, ctypes.addressof(pointers)))
        line = (f"{launch}({kernel}, {grid_x}, {grid_y}, 1, {block_x}, 1, 1, {bytes_shared}, at, "
                f"{parameters}{last})")
        if together or not self.depends:
            self.lines.append(line)
            self.is_launches_alone &= not together
        else:
            depend = cuda.DependentLaunch(function, (grid, layers), block, shared, pointers)
            self.scope[f"depend{k}"] = depend
            self.lines += [f"depend{k}(at)"] if waits else [f"if captured: depend{k}(at)", f"else: {line}"]
            launched = launched._replace(attribute=depend.attribute if waits else None)
        self.launched.append(launched)

    def more(self, line: str) -> None:
        """What Python alone can do."""
        self.lines.append(line)
        self.is_launches_alone = False

    def at_a_time(self, source: Specialisation, block: int, blocks: int, shared: int, cluster: int) -> int:
        """Clusters that the device holds, `blocks` being what was reckoned with on a multiprocessor."""
        device = self.call.device
        most = blocks * cuda.multiprocessors(device) // cluster
        if cluster == 1:
            return most
        function = cuda.function(source.text, source.entry, device, self.call.problem.name)
        cuda.allow(function, shared, cluster)
        return min(most, cuda.clusters_at_a_time(function, block, shared, cluster) or most)

    def compile(self, arguments: Sequence[str], another: Callable[[], Run]) -> Run:
        """`another` does all this again: see `Lines.function`."""
        device = self.call.device
        elsewhere = f"if current() != {device}: return elsewhere({device}, run, {', '.join(arguments)})"
        return self.function(arguments, *[elsewhere] * ("current" in self.scope), another=another)

    def prepare_settling(self, run: Run, arguments: Sequence[str], returned: Sequence[str]) -> Run:
        """`run`, which is compiled from this, so that it can be machine code if it gives what it allocates;
        where it is given random numbers, also together with whoever draws them."""
        device = self.call.device
        if not self.is_launches_alone or not {o.name for o in self.allocated}.issuperset(returned):
            return run
        plan = Plan(run, arguments, self.allocated, returned, self.launched, device, threading.get_ident(),
                    self.scope, still=(cuda.current, device) if "current" in self.scope else None)

        def on_device(plan: Plan) -> Run:
            from fusionrt.runtime import native
            with torch.cuda.device(device):
                return native.machine_code(plan)

        on = functools.lru_cache(4)(lambda stream: on_device(plan))  # for all who ask
        settling.prepare_settling(run, lambda: on(self.scope["stream"](device)))
        if RANDOM in arguments:
            settling.prepare_settling_drawing(run, lambda drawn, counters: on_device(plan._replace(
                general=drawn, arguments=arguments[:-1], random=random.taking(device, counters))))
        return run


def _elsewhere(device: int, run: Run, *args: Any) -> Any:
    """`run`, called while another device is the current one."""
    with torch.cuda.device(device):
        return run(*args)
