"""A transfer engine: READ and WRITE the registered memory of peers, in batches, over plain TCP.

`tensorferry.mooncake` has the names, signatures and results of `mooncake.engine`.
"""

from tensorferry._native import __version__

__all__ = ["__version__"]
