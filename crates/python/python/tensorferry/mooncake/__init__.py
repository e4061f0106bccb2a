"""What `mooncake.engine` offers: the same names, signatures and results.

Either import this module in its place, or call `install()`, after which `mooncake.engine` is this engine, or leave
the program as it is and run it with `python -m tensorferry.mooncake script.py ARGS...`.
"""

from tensorferry._native import (
    SUPPORT_CUDA,
    SUPPORT_EFA,
    SUPPORT_HIP,
    SUPPORT_INTRA_NVLINK,
    SUPPORT_MNNVL,
    SUPPORT_MUSA,
    InnerTransferEngine,
    Read,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    Write,
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
