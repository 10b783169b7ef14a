"""`torch.mybackend`: mirrors `torch.cuda` by name wherever this device has the thing."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mybackend import _C
from mybackend import memory as memory
from mybackend.memory import (
    MemPool,
    _dump_snapshot,
    _record_memory_history,
    _snapshot,
    attach_out_of_memory_observer,
    empty_cache,
    empty_host_cache,
    get_per_process_memory_fraction,
    host_memory_stats,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    tracker_stats,
    use_mem_pool,
)

__all__ = [
    "Event",
    "MemPool",
    "Stream",
    "StreamContext",
    "_dump_snapshot",
    "_record_memory_history",
    "_snapshot",
    "attach_out_of_memory_observer",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "empty_host_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "host_memory_stats",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "tracker_stats",
    "use_mem_pool",
]  # fmt: skip

Device = torch.device | str | int | None
_init_lock = threading.Lock()


def _index(device: Device) -> int:
    """The index of `device`: an int, a string, a torch.device, or None for the current one."""
    if device is None:
        return _C._current_device()
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "mybackend":
            raise ValueError(f"Expected a mybackend device, but got: {device}")
        return _C._current_device() if device.index is None else device.index
    if isinstance(device, bool) or not isinstance(device, int):
        raise TypeError(f"Expected a torch.device, a string, an int or None, but got {type(device).__name__}")
    return device


# --- The device as a whole --------------------------------------------------------------------


def is_available() -> bool:
    """Whether at least one device can be used."""
    return _C._device_count() > 0


def device_count() -> int:
    """The number of devices: MYBACKEND_DEVICE_COUNT, or `device_count` of the configuration; with
    driver:cuda, of GPUs (0 without a GPU driver)."""
    return _C._device_count()


def init() -> None:
    """Starts the devices, which the first use does by itself. Raises ValueError when the
    configuration variable in force is malformed."""
    _lazy_init()


def _lazy_init() -> None:
    with _init_lock:
        _C._init()


def is_initialized() -> bool:
    """Whether the devices were started."""
    return _C._is_initialized()


def _is_in_bad_fork() -> bool:
    """Whether this is a forked child that cannot use the device. Never on the sim driver: its
    devices are host memory."""
    return _C._is_in_bad_fork()


def current_device() -> int:
    """The index of the calling thread's current device."""
    return _C._current_device()


def set_device(device: Device) -> None:
    """Makes `device` current for the calling thread; a negative index changes nothing."""
    index = _index(device)
    if index >= 0:
        _C._set_device(index)


def _exchange_device(device: int) -> int:
    return _C._exchange_device(device)


def _maybe_exchange_device(device: int) -> int:
    return _C._exchange_device(device)


class device:
    """Context manager: makes a device current and restores the previous one.

    `device` is a torch.device, a string, an index, or None (no change)."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> device:
        self.prev_idx = _C._exchange_device(self.idx)
        return self

    def __exit__(self, *exception: Any) -> None:
        _C._exchange_device(self.prev_idx)


class device_of(device):
    """Context manager: makes the device of `obj` (a tensor or storage) current, if it is ours."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == "mybackend" else None)


@dataclass(frozen=True)
class DeviceProperties:
    """What `get_device_properties` gives. Sizes in bytes."""

    name: str
    total_memory: int
    page_size: int
    multi_processor_count: int
    driver: str
    major: int = 0
    minor: int = 0


def get_device_properties(device: Device = None) -> DeviceProperties:
    """The properties of a device."""
    _lazy_init()
    return DeviceProperties(driver=_C._driver_name(), **_C._device_info(_index(device)))


def get_device_name(device: Device = None) -> str:
    """The name of a device."""
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """(0, 0): the kernels are the CPU's, which have no capability numbers."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def synchronize(device: Device = None) -> None:
    """Waits for all work on all streams of a device; raises the first error of a queued task."""
    _C._synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that `torch.autocast("mybackend")` takes."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """True: the borrowed kernels take bfloat16."""
    return True


# --- Streams and events -------------------------------------------------------------------------


class Stream(torch.Stream):
    """A FIFO of work on one device. `priority`: -1 is more urgent than 0."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("mybackend", _index(device)), priority=priority)


class Event(torch.Event):
    """A marker in a stream. `enable_timing` lets two events be compared by `elapsed_time`.

    With `interprocess`, another process can open it by its `ipc_handle()` and query it or wait for
    it, while this one lives. There, use `event.wait(stream)`: `stream.wait_event(event)` knows only
    events of its own process."""

    _ipc: _C._IpcEvent | None

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        if interprocess and enable_timing:
            raise ValueError("an event between processes cannot have enable_timing")
        event = super().__new__(cls, device="mybackend", enable_timing=enable_timing, blocking=blocking)
        event._ipc = _C._IpcEvent.create() if interprocess else None
        return event

    @classmethod
    def from_ipc_handle(cls, device: Device, handle: bytes) -> Event:
        """The event that another process made, for streams of `device`. Raises ValueError when it is
        no handle, or the maker is gone."""
        _index(device)
        try:
            text = bytes(handle).decode("ascii")
        except UnicodeDecodeError as error:
            raise ValueError("not the handle of an event between processes") from error
        event = cls()
        event._ipc = _C._IpcEvent.open(text)
        return event

    def ipc_handle(self) -> bytes:
        """What `from_ipc_handle` needs, to be sent to another process. Raises RuntimeError for an
        event made without `interprocess=True`."""
        if self._ipc is None:
            raise RuntimeError("ipc_handle: the event was not made with interprocess=True")
        return self._ipc.handle.encode("ascii")

    def record(self, stream: torch.Stream | None = None) -> None:
        """Marks the end of what the stream (default: the current one) has queued."""
        stream = current_stream() if stream is None else stream
        super().record(stream)
        if self._ipc is not None:
            self._ipc.record(stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Later work of the stream (default: the current one) starts when the event is complete."""
        stream = current_stream() if stream is None else stream
        if self._ipc is not None:
            self._ipc.wait(stream)
        else:
            super().wait(stream)

    def query(self) -> bool:
        """Whether what was recorded is done."""
        return self._ipc.query() if self._ipc is not None else super().query()

    def synchronize(self) -> None:
        """Returns when what was recorded is done."""
        if self._ipc is not None:
            self._ipc.synchronize()
        else:
            super().synchronize()

    def elapsed_time(self, other: torch.Event) -> float:
        """Milliseconds from this event to `other`; both must be recorded and complete."""
        return _C._event_elapsed_ms(self.event_id, other.event_id)


def current_stream(device: Device = None) -> torch.Stream:
    """The calling thread's current stream of a device."""
    return torch.accelerator.current_stream(torch.device("mybackend", _index(device)))


def default_stream(device: Device = None) -> torch.Stream:
    """The default stream of a device."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_device_type())


def _device_type() -> int:
    return 20  # c10::DeviceType::PrivateUse1


def set_stream(stream: torch.Stream | None) -> None:
    """Makes `stream` the current stream of its device, which becomes the current device."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager: makes a stream current and restores stream and device."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._previous: list[tuple[int, torch.Stream]] = []

    def __enter__(self) -> StreamContext:
        if self.stream is not None:
            self._previous.append((_C._current_device(), current_stream(self.stream.device)))
            set_stream(self.stream)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            index, previous = self._previous.pop()
            set_stream(previous)
            _C._set_device(index)


def stream(stream: torch.Stream | None) -> StreamContext:
    """`with torch.mybackend.stream(s):` runs what is inside on `s`. None changes nothing."""
    return StreamContext(stream)


# --- Random numbers -----------------------------------------------------------------------------


def _default_generator(device: Device = None) -> torch.Generator:
    return _C._default_generator(_index(device))


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(_default_generator(i) for i in range(device_count()))
    if name == "_initialized":  # asked by torch.utils.checkpoint before it saves generator states
        return _C._is_initialized()
    raise AttributeError(f"module 'torch.mybackend' has no attribute {name!r}")


def get_rng_state(device: Device = "mybackend") -> torch.Tensor:
    """The state of a device's default generator: a CPU tensor of bytes."""
    return _default_generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' default generators."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Device = "mybackend") -> None:
    """Sets the state of a device's default generator to what `get_rng_state` gave."""
    _default_generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the states of all devices' default generators."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seeds the current device's default generator. With the same seed, device and CPU draw the
    same numbers."""
    _default_generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the default generators of all devices. Starts nothing."""
    seed = int(seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed: expected a 64-bit integer, not {seed}")
    _C._seed_default_generators(seed if seed < 1 << 63 else seed - (1 << 64))


def seed() -> int:
    """Seeds the current device's default generator from the system; returns the seed."""
    return _default_generator().seed()


def seed_all() -> None:
    """Seeds all default generators with one seed from the system."""
    manual_seed_all(_default_generator(0).seed())


def initial_seed() -> int:
    """The seed of the current device's default generator."""
    return _default_generator().initial_seed()
