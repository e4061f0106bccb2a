"""A transfer engine: READ and WRITE the registered memory of peers, in batches, over plain TCP.

    with tensorferry.Engine("10.0.0.1") as engine:
        segment = engine.open("10.0.0.2:15123")
        segment.write(array, segment.buffers()[0].addr)

docs/python.md has the guide. `tensorferry.mooncake` has the names, signatures and results of `mooncake.engine`.
"""

from tensorferry._errors import (
    BadArgument,
    BadLocalAddress,
    BadName,
    Busy,
    Cancelled,
    Closed,
    ConfigError,
    ConnectionLost,
    DeviceError,
    Error,
    ForkedProcess,
    NotifyFailed,
    NotRegistered,
    OutcomeUnknown,
    Overlap,
    PeerUnreachable,
    PortsExhausted,
    ProtocolError,
    Refused,
    StillInUse,
    TimedOut,
    Unregistered,
)
from tensorferry._native import Buffer, Engine, Notification, Registration, Segment, Transfer, __version__

__all__ = [
    "BadArgument",
    "BadLocalAddress",
    "BadName",
    "Buffer",
    "Busy",
    "Cancelled",
    "Closed",
    "ConfigError",
    "ConnectionLost",
    "DeviceError",
    "Engine",
    "Error",
    "ForkedProcess",
    "NotRegistered",
    "Notification",
    "NotifyFailed",
    "OutcomeUnknown",
    "Overlap",
    "PeerUnreachable",
    "PortsExhausted",
    "ProtocolError",
    "Refused",
    "Registration",
    "Segment",
    "StillInUse",
    "TimedOut",
    "Transfer",
    "Unregistered",
    "__version__",
    "doctor",
]

for _name in __all__:
    # Where users find them, in tracebacks and in pickles.
    if isinstance(globals().get(_name), type) and globals()[_name].__module__ == "tensorferry._errors":
        globals()[_name].__module__ = __name__
del _name


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
