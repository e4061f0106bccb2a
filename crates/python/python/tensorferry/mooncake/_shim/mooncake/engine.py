"""`mooncake.engine`, as tensorferry has it; what is not in there comes from the one that is installed, if one is."""

from typing import TYPE_CHECKING

from tensorferry.mooncake import (
    SUPPORT_EFA,
    SUPPORT_INTRA_NVLINK,
    SUPPORT_MNNVL,
    InnerTransferEngine,
    Read,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    Write,
)
from tensorferry.mooncake import __all__ as __all__

if TYPE_CHECKING:
    from tensorferry.mooncake import SUPPORT_CUDA, SUPPORT_HIP, SUPPORT_MUSA
else:

    def __getattr__(name):
        # Whoever looks a module over asks for names such as `__path__`; that is no reason to load another engine.
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in __all__:  # Not imported above: they are found out when somebody asks.
            from tensorferry import mooncake

            return getattr(mooncake, name)
        from tensorferry.mooncake._stand_in import installed

        found = globals()[name] = installed(name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
