from collections.abc import Generator, Sequence
from os import PathLike
from typing import Any, ClassVar, Final, Literal, Protocol, Self, SupportsFloat, SupportsIndex, TypeAlias, final

from _typeshed import ReadableBuffer
from typing_extensions import disjoint_base

from tensorferry._errors import Error

__all__ = [
    "Buffer",
    "Engine",
    "InnerTransferEngine",
    "Notification",
    "Read",
    "Registration",
    "Segment",
    "Transfer",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Wakeups",
    "Write",
    "__version__",
    "doctor",
    "main",
    "supports",
]

__version__: Final[str]

Read: Final[TransferOpcode]
Write: Final[TransferOpcode]

_Text: TypeAlias = str | bytes
# The class has an attribute of the same name.
_Opcode: TypeAlias = TransferOpcode

class _Ints(Protocol):
    """Lists, tuples and arrays of integers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> SupportsIndex: ...

@final
class TransferOpcode:
    Read: ClassVar[TransferOpcode]
    Write: ClassVar[TransferOpcode]
    __members__: ClassVar[dict[str, TransferOpcode]]
    def __new__(cls, value: int) -> TransferOpcode: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __lt__(self, other: TransferOpcode, /) -> bool: ...
    def __le__(self, other: TransferOpcode, /) -> bool: ...
    def __gt__(self, other: TransferOpcode, /) -> bool: ...
    def __ge__(self, other: TransferOpcode, /) -> bool: ...
    def __reduce__(self) -> tuple[type[TransferOpcode], tuple[int]]: ...

@final
class TransferNotify:
    def __new__(cls, name: _Text = "", msg: _Text = "") -> TransferNotify: ...
    @property
    def name(self) -> str: ...
    @name.setter
    def name(self, value: _Text) -> None: ...
    @property
    def msg(self) -> str: ...
    @msg.setter
    def msg(self, value: _Text) -> None: ...

@final
class InnerTransferEngine: ...

@disjoint_base
class TransferEngine:
    TransferOpcode: ClassVar[type[_Opcode]]

    def __new__(cls) -> TransferEngine: ...

    # Life
    def initialize(
        self, local_hostname: _Text, metadata_server: _Text, protocol: _Text, device_name: _Text, /
    ) -> int: ...
    def initialize_ext(
        self,
        local_hostname: _Text,
        metadata_server: _Text,
        protocol: _Text,
        device_name: _Text,
        metadata_type: _Text,
        /,
    ) -> int: ...
    def close(self) -> None: ...
    def get_rpc_port(self) -> int: ...
    @staticmethod
    def last_error() -> str | None: ...
    def stats(self) -> dict[str, Any]: ...

    # Memory
    def register_memory(
        self, buffer_addr: SupportsIndex, capacity: SupportsIndex, location: _Text = "*"
    ) -> int: ...
    def unregister_memory(self, addr: SupportsIndex, /) -> int: ...
    def batch_register_memory(
        self, buffer_addresses: _Ints, capacities: _Ints, location: _Text = "*"
    ) -> int: ...
    def batch_unregister_memory(self, addrs: _Ints, /) -> int: ...
    def allocate_managed_buffer(self, length: SupportsIndex, /) -> int: ...
    def free_managed_buffer(self, addr: SupportsIndex, length: SupportsIndex, /) -> int: ...
    def write_bytes_to_buffer(
        self, addr: SupportsIndex, data: str | ReadableBuffer, length: SupportsIndex, /
    ) -> int: ...
    def read_bytes_from_buffer(self, addr: SupportsIndex, length: SupportsIndex, /) -> bytes: ...

    # Transfers
    def transfer_sync_write(
        self,
        target_hostname: _Text,
        buffer: SupportsIndex,
        peer_buffer_address: SupportsIndex,
        length: SupportsIndex,
        transport_hint: _Text = "",
    ) -> int: ...
    def transfer_sync_read(
        self,
        target_hostname: _Text,
        buffer: SupportsIndex,
        peer_buffer_address: SupportsIndex,
        length: SupportsIndex,
        transport_hint: _Text = "",
    ) -> int: ...
    def transfer_sync(
        self,
        target_hostname: _Text,
        buffer: SupportsIndex,
        peer_buffer_address: SupportsIndex,
        length: SupportsIndex,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: _Text = "",
    ) -> int: ...
    def batch_transfer_sync_write(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        transport_hint: _Text = "",
    ) -> int: ...
    def batch_transfer_sync_read(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        transport_hint: _Text = "",
    ) -> int: ...
    def batch_transfer_sync(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: _Text = "",
    ) -> int: ...
    def batch_transfer_async_write(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        transport_hint: _Text = "",
    ) -> int: ...
    def batch_transfer_async_read(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        transport_hint: _Text = "",
    ) -> int: ...
    def batch_transfer_async(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        opcode: _Opcode,
        transport_hint: _Text = "",
    ) -> int: ...
    def transfer_submit_write(
        self,
        target_hostname: _Text,
        buffer: SupportsIndex,
        peer_buffer_address: SupportsIndex,
        length: SupportsIndex,
        transport_hint: _Text = "",
    ) -> int: ...
    def transfer_check_status(self, batch_id: SupportsIndex, /) -> int: ...
    def get_batch_transfer_status(self, batch_ids: _Ints, /) -> int: ...

    # GPU streams
    def transfer_write_on_cuda(
        self,
        target_hostname: _Text,
        buffer: SupportsIndex,
        peer_buffer_address: SupportsIndex,
        length: SupportsIndex,
        stream_ptr: SupportsIndex = 0,
        transport_hint: _Text = "",
    ) -> None: ...
    def transfer_read_on_cuda(
        self,
        target_hostname: _Text,
        buffer: SupportsIndex,
        peer_buffer_address: SupportsIndex,
        length: SupportsIndex,
        stream_ptr: SupportsIndex = 0,
        transport_hint: _Text = "",
    ) -> None: ...
    def batch_transfer_write_on_cuda(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        stream_ptr: SupportsIndex = 0,
        transport_hint: _Text = "",
    ) -> None: ...
    def batch_transfer_read_on_cuda(
        self,
        target_hostname: _Text,
        buffers: _Ints,
        peer_buffer_addresses: _Ints,
        lengths: _Ints,
        stream_ptr: SupportsIndex = 0,
        transport_hint: _Text = "",
    ) -> None: ...

    # Peers
    def get_first_buffer_address(self, segment_name: _Text, /) -> int: ...
    def get_notifies(self) -> list[TransferNotify]: ...
    def send_probe(self, peer_server_name: _Text) -> int: ...

    # For programs that ask
    def get_local_topology(self, device_name: _Text | None = None) -> str: ...
    def warmup_efa_segment(self, segment_name: _Text) -> int: ...
    def get_engine(self) -> InnerTransferEngine | None: ...
    def get_engine_ptr(self) -> int: ...

# The pythonic face: what `tensorferry` has

class _Dlpack(Protocol):
    def __dlpack__(self) -> object: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

_Range: TypeAlias = tuple[SupportsIndex, SupportsIndex]
_Memory: TypeAlias = ReadableBuffer | _CudaArray | _Dlpack | _Range
_Stream: TypeAlias = _CudaStream | _TorchStream | SupportsIndex
_OnFull: TypeAlias = Literal["wait", "refuse"] | float
_Time: TypeAlias = float | str
_Size: TypeAlias = int | str

@final
class Buffer:
    @property
    def addr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Notification:
    __match_args__: ClassVar[tuple[str, str]]
    def __new__(cls, name: str = "", message: str = "") -> Notification: ...
    @property
    def name(self) -> str: ...
    @property
    def message(self) -> str: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Engine:
    def __new__(
        cls,
        host: str = "127.0.0.1",
        *,
        bind: str | None = None,
        advertise: str | None = None,
        ports: tuple[int, int] | str | None = None,
        lanes_per_peer: int | None = None,
        io_threads: int | None = None,
        transfer_timeout: _Time | None = None,
        connect_timeout: _Time | None = None,
        queue_bytes: _Size | None = None,
        lane_idle_probe: _Time | None = None,
        lane_keep: _Time | None = None,
        silence_timeout: _Time | None = None,
        spin: _Time | None = None,
        safe_copy: bool | None = None,
        gpu: str | None = None,
        staging_slots: int | None = None,
        staging_slot_bytes: _Size | None = None,
        log: str | None = None,
    ) -> Engine: ...
    @property
    def name(self) -> str: ...
    @property
    def control_port(self) -> int: ...
    @property
    def data_port(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def register(self, obj: _Memory, *, readonly: bool = False, location: str = "*") -> Registration: ...
    def buffers(self) -> list[Buffer]: ...
    def open(self, name: str) -> Segment: ...
    def segment(self, name: str) -> Segment: ...
    def probe(self, name: str) -> None: ...
    def notifications(self) -> list[Notification]: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Registration:
    @property
    def addr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def unregister(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Segment:
    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> Engine: ...
    def buffers(self) -> list[Buffer]: ...
    def read(
        self,
        local: _Memory | SupportsIndex,
        remote: SupportsIndex,
        length: SupportsIndex | None = None,
        *,
        timeout: SupportsFloat | None = None,
        stream: _Stream | None = None,
        hold_stream: bool = False,
        notify: Notification | None = None,
        on_full: _OnFull = "wait",
    ) -> None: ...
    def write(
        self,
        local: _Memory | SupportsIndex,
        remote: SupportsIndex,
        length: SupportsIndex | None = None,
        *,
        timeout: SupportsFloat | None = None,
        stream: _Stream | None = None,
        hold_stream: bool = False,
        notify: Notification | None = None,
        on_full: _OnFull = "wait",
    ) -> None: ...
    def read_async(
        self,
        local: _Memory | SupportsIndex,
        remote: SupportsIndex,
        length: SupportsIndex | None = None,
        *,
        timeout: SupportsFloat | None = None,
        stream: _Stream | None = None,
        hold_stream: bool = False,
        notify: Notification | None = None,
        on_full: _OnFull = "wait",
    ) -> Transfer: ...
    def write_async(
        self,
        local: _Memory | SupportsIndex,
        remote: SupportsIndex,
        length: SupportsIndex | None = None,
        *,
        timeout: SupportsFloat | None = None,
        stream: _Stream | None = None,
        hold_stream: bool = False,
        notify: Notification | None = None,
        on_full: _OnFull = "wait",
    ) -> Transfer: ...
    def submit(
        self,
        op: Literal["read", "write"],
        locals: _Ints | Sequence[_Memory],
        remotes: _Ints,
        lengths: _Ints | SupportsIndex | None = None,
        *,
        timeout: SupportsFloat | None = None,
        stream: _Stream | None = None,
        hold_stream: bool = False,
        notify: Notification | None = None,
        on_full: _OnFull = "wait",
    ) -> Transfer: ...
    def notify(self, notification: Notification) -> None: ...

@final
class Transfer:
    @property
    def done(self) -> bool: ...
    @property
    def state(self) -> Literal["running", "completed", "failed", "timed_out", "cancelled"]: ...
    def wait(self, timeout: SupportsFloat | None = None) -> bool: ...
    def result(self, timeout: SupportsFloat | None = None) -> None: ...
    def cancel(self) -> None: ...
    def _request_cancel(self) -> None: ...
    def failures(self) -> list[tuple[int, Error]]: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __await__(self) -> Generator[Any, None, None]: ...

@final
class Wakeups:
    def __new__(cls, event: int, /) -> Wakeups: ...
    def fileno(self) -> int: ...
    def watch(self, transfer: Transfer, /) -> int | None: ...
    def forget(self, ticket: int, /) -> None: ...
    def take(self) -> list[int]: ...

def main(args: Sequence[str | PathLike[str]], rerun: Sequence[str | PathLike[str]]) -> int: ...
def doctor(require: Sequence[str], move: bool) -> str: ...
def supports(vendor: _Text, /) -> bool: ...
