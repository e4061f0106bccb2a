"""`mooncake.engine`, as tensorferry has it; what is not in there comes from the one that is installed, if one is."""

from tensorferry.mooncake import *  # noqa: F403
from tensorferry.mooncake import __all__ as __all__


def __getattr__(name: str) -> object:
    # Whoever looks a module over asks for names such as `__path__`; that is no reason to load another engine.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tensorferry.mooncake._stand_in import installed

    found = globals()[name] = installed(name)
    return found
