"""A stand-in for the CUDA runtime over tensors of the CPU: it records what the runner asks of it, in order.

A captured graph holds the torch calls of the capture and runs them again on the same tensors. No kernel of
ours runs: models for this runtime are plain torch.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
# Calls after which the host knows a value of the device: it has waited for all work before.
WAITING = (
    Tensor.cpu,
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    torch.nonzero,
)
# Calls that only allocate, or look at a tensor.
NO_KERNEL = (torch.empty, Tensor.__len__, Tensor.__getitem__, Tensor.data_ptr, Tensor.view)


class DeviceTensor(Tensor):
    """In the memory of the device, as far as the code under test can see."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


class PinnedTensor(Tensor):
    """In pinned memory of the host."""


class Call(NamedTuple):
    """One call of the runtime; `value` is a number of bytes, or the identity of a stream or graph."""

    name: str
    value: int = 0


class FakeEvent:
    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self._is_done = True

    def record(self) -> None:
        self._is_done = not self._cuda.is_slow
        self._cuda.note("record event")

    def query(self) -> bool:
        self._cuda.check_device("query event")
        return self._is_done

    def synchronize(self) -> None:
        self._is_done = True
        self._cuda.note("wait for event")


class FakeStream:
    device = DEVICE

    def __init__(self, cuda: "FakeCuda", priority: int = 0) -> None:
        self._cuda = cuda
        self.priority = priority

    def wait_stream(self, other: "FakeStream") -> None: ...

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.note("stream waits for event", id(self))

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._cuda)
        event.record()
        self._cuda.events_on[id(self)] += 1
        return event


class FakeGraph:
    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.memory = -1  # handle of the pool
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], Tensor]] = []

    def replay(self) -> None:
        self._cuda.note("replay", id(self))
        with torch._C.DisableTorchFunction():  # no call of the host
            for function, arguments, options, output in self.calls:
                output.copy_(function(*arguments, **options))


class FakeCudart:
    """The functions of the runtime library that torch passes on; they return the number of an error, or 0."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if self._cuda.pins_nothing:
            self._cuda.last_error = 801
            return self._cuda.last_error
        self._cuda.note("pin", num_bytes)
        self._cuda.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._cuda.note("unpin", self._cuda.registered.pop(address))
        return 0


class FakeCuda(TorchFunctionMode):
    """The runtime; a context manager. `calls` is everything that it was asked to do."""

    def __init__(self, *, total_bytes: int = 2**40, shared_bytes: int = 0, driver_bytes: int = 0) -> None:
        """shared_bytes: of all graphs in one memory pool. driver_bytes: of each graph."""
        super().__init__()
        self.calls: list[Call] = []
        self.is_slow = False  # True: copies end when they are waited for
        self.streams: list[FakeStream] = []  # that were made, in this order
        self.events_on: Counter[int] = Counter()  # identity of a stream -> events recorded by it
        self.strays: list[str] = []  # calls of threads that had not chosen the device: they open another one
        self._of_thread = threading.local()  # has_device
        self.pins_nothing = False  # True: the driver refuses to pin memory that torch did not allocate
        self.last_error = 0  # that torch raises, and clears, after the next kernel
        self.registered: dict[int, int] = {}  # address -> bytes of pinned memory that torch did not allocate
        self._total_bytes, self._shared_bytes, self._driver_bytes = total_bytes, shared_bytes, driver_bytes
        self._graphs: WeakSet[FakeGraph] = WeakSet()
        self._stream = FakeStream(self)
        self._capturing: FakeGraph | None = None
        self._num_pools = 0

    def note(self, name: str, value: int = 0) -> None:
        assert self._capturing is None or name.startswith(("on device", "forward")), f"{name} in a capture"
        self.calls.append(Call(name, value))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for the functions and classes of torch.cuda that the runner uses."""
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "set_device": self._set_device,
            "device": self._on_device,
            "cudart": lambda: FakeCudart(self),
            "Stream": self._make_stream,
            "set_stream": self._set_stream,
            "Event": lambda: FakeEvent(self),
            "CUDAGraph": self._make_graph,
            "current_stream": lambda device=None: self._stream,
            "stream": self._on_stream,
            "graph": self._capture,
            "graph_pool_handle": self._make_pool,
            "synchronize": lambda device: self.note("wait for device"),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_reserved": lambda device: self.reserved_bytes,
            "max_memory_reserved": lambda device: self.reserved_bytes,
            "mem_get_info": lambda device: (self.free_bytes, self._total_bytes),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @property
    def reserved_bytes(self) -> int:
        return self._shared_bytes * len({graph.memory for graph in self._graphs})

    @property
    def free_bytes(self) -> int:
        return self._total_bytes - self.reserved_bytes - self._driver_bytes * len(self._graphs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        is_on_device = _is_cuda(options.get("device")) or any(isinstance(arg, DeviceTensor) for arg in args)
        is_pinned = options.pop("pin_memory", False) or any(isinstance(arg, PinnedTensor) for arg in args)
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        if "pin_memory" in (kwargs or {}) and is_pinned:
            self.note("pin", args[0] if isinstance(args[0], int) else 0)
        if func is Tensor.to and len(args) > 1 and _is_place(args[1]):
            return self._move(args[0], args[1], options.get("non_blocking", False))
        if func is Tensor.pin_memory:
            self.note("pin", args[0].nbytes)
            return args[0].as_subclass(PinnedTensor)
        if func is Tensor.copy_:
            self._note_copy(args[0], args[1], options.get("non_blocking", False))
        elif is_on_device and func in WAITING:
            self.note(f"wait in {func.__name__}")
        if is_on_device and func not in NO_KERNEL and self.last_error:
            error, self.last_error = self.last_error, 0
            raise RuntimeError(f"CUDA error {error}")
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **options)
        if not isinstance(output, Tensor):
            return output
        if self._capturing is not None:
            self._capturing.calls.append((func, args, options, output))
        kind = DeviceTensor if is_on_device and func not in WAITING else PinnedTensor
        return output.as_subclass(kind) if is_on_device or is_pinned else output

    def _note_copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        sides = isinstance(source, DeviceTensor), isinstance(target, DeviceTensor)
        direction = {(False, True): "upload", (True, False): "download", (True, True): "on device"}.get(sides)
        if direction is None:
            return
        host = target if direction == "download" else source
        is_blocking = direction != "on device" and not (non_blocking and self._is_pinned(host))
        self.note(f"blocking {direction}" if is_blocking else direction, source.nbytes)

    def _is_pinned(self, host: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            first = host.data_ptr()
        return isinstance(host, PinnedTensor) or any(
            start <= first < start + size for start, size in self.registered.items()
        )

    def _move(self, tensor: Tensor, place: torch.device | str, non_blocking: bool) -> Tensor:
        """A new tensor at the place; to the host it is pinned if the copy does not block, as torch's is."""
        with torch._C.DisableTorchFunctionSubclass():
            made: Tensor = tensor.clone()
        host = PinnedTensor if isinstance(tensor, PinnedTensor) or non_blocking else Tensor
        target = made.as_subclass(DeviceTensor if _is_cuda(place) else host)
        if non_blocking and _is_cuda(place) and not isinstance(tensor, PinnedTensor):
            non_blocking = False
        self._note_copy(target, tensor, non_blocking)
        return target

    def check_device(self, name: str) -> None:
        """Note a call that is made on the current device of its thread."""
        if not getattr(self._of_thread, "has_device", False):
            self.strays.append(name)

    def _set_device(self, device: torch.device) -> None:
        self._of_thread.has_device = True

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        before = getattr(self._of_thread, "has_device", False)
        self._of_thread.has_device = True
        try:
            yield
        finally:
            self._of_thread.has_device = before

    @contextmanager
    def _on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before
            self.check_device("leave stream")

    @contextmanager
    def _capture(
        self, graph: FakeGraph, pool: int, stream: FakeStream, *, capture_error_mode: str
    ) -> Iterator[None]:
        self.note(f"capture {capture_error_mode}", id(stream))
        graph.memory = pool
        with self._on_stream(stream):
            self._capturing = graph
            try:
                yield
            finally:
                self._capturing = None
        self._graphs.add(graph)

    def _make_stream(self, device: torch.device, priority: int = 0) -> FakeStream:
        stream = FakeStream(self, priority)
        self.streams.append(stream)
        return stream

    def _set_stream(self, stream: FakeStream) -> None:
        self._stream = stream

    def _make_graph(self) -> FakeGraph:
        return FakeGraph(self)

    def _make_pool(self) -> int:
        self._num_pools += 1
        return self._num_pools


def _is_place(value: object) -> bool:
    return isinstance(value, torch.device | str)


def _is_cuda(device: object) -> bool:
    return isinstance(device, torch.device) and device.type == "cuda"
