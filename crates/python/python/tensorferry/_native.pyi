from collections.abc import Sequence
from os import PathLike
from typing import Any, ClassVar, Final, Protocol, SupportsIndex, TypeAlias, final

from _typeshed import ReadableBuffer
from typing_extensions import disjoint_base

__all__ = [
    "InnerTransferEngine",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
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

def main(args: Sequence[str | PathLike[str]], rerun: Sequence[str | PathLike[str]]) -> int: ...
def doctor(require: Sequence[str], move: bool) -> str: ...
def supports(vendor: _Text, /) -> bool: ...
