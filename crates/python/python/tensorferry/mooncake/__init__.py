"""What `mooncake.engine` offers: the same names, signatures and results.

Either import this module in its place, or call `install()`, after which `mooncake.engine` is this engine, or leave
the program as it is and run it with `python -m tensorferry.mooncake script.py ARGS...`.

`SUPPORT_CUDA`, `SUPPORT_HIP` and `SUPPORT_MUSA` say whether this process could use GPUs of that kind: whether the
vendor's library is loaded, or can be. They are found out when they are first asked for, and initialise nothing.
"""

from typing import TYPE_CHECKING, Final

from tensorferry._native import (
    InnerTransferEngine,
    Read,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    Write,
    supports,
)
from tensorferry.mooncake._stand_in import install as install

# What `mooncake.engine` has; `install` is not in there.
__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "InnerTransferEngine",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]

SUPPORT_EFA: Final = False
SUPPORT_INTRA_NVLINK: Final = False
SUPPORT_MNNVL: Final = False

if TYPE_CHECKING:
    SUPPORT_CUDA: bool
    SUPPORT_HIP: bool
    SUPPORT_MUSA: bool
else:
    _VENDORS = {"SUPPORT_CUDA": "cuda", "SUPPORT_HIP": "hip", "SUPPORT_MUSA": "musa"}

    def __getattr__(name):
        vendor = _VENDORS.get(name)
        if vendor is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = supports(vendor)
        if found:  # "No" can change: a framework may bring its library with it.
            globals()[name] = found
        return found

    def __dir__():
        return sorted({*globals(), *_VENDORS})
