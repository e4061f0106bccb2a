from collections.abc import Sequence
from typing import Any

from tensorferry._native import __version__ as __version__

__all__ = ["__version__", "doctor"]

def doctor(*, require: str | Sequence[str] = (), move: bool = False) -> dict[str, Any]: ...
