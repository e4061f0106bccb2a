"""A transfer engine: READ and WRITE the registered memory of peers, in batches, over plain TCP.

`tensorferry.mooncake` has the names, signatures and results of `mooncake.engine`.
"""

from tensorferry._native import __version__

__all__ = ["__version__", "doctor"]


def doctor(*, require=(), move=False):
    """Says what can be moved in this process, and what stands in the way: the document of `tensorferry doctor --json`.

    `require` ("cuda", "musa", "hip", "gpu" for any of them, or several) and `move` are the options of the program.
    What does not move is told in the document, in "ok" and "problems". ValueError is for a malformed setting, and for
    something required that cannot be.

    The GPU libraries that are found are initialised in this process: from then on, CUDA cannot be used in children
    that are forked from it. `require` and `move` make a context on each device that they try, which stays.
    """
    import json

    from tensorferry import _native

    return json.loads(_native.doctor([require] if isinstance(require, str) else list(require), move))
