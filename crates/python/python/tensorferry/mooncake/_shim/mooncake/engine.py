"""`mooncake.engine`, as tensorferry has it."""

from tensorferry.mooncake import *  # noqa: F403
from tensorferry.mooncake import __all__ as __all__
