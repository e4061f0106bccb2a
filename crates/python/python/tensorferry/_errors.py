"""The exceptions of `tensorferry`. Nothing is imported here, so that importing the package stays cheap."""


class Error(Exception):
    """Whatever the engine refuses, or fails to do. The text says to what, what happened, and what to do next.

    The fields are None where they say nothing.
    """

    #: The number of the error, as in docs/errors.md; a number is never used twice.
    code: int | None = None
    #: Its name there, such as "TimedOut"; finer than the class.
    kind: str | None = None
    #: Whether the same call can succeed later with no change on this side.
    retryable: bool | None = None
    #: The name of the peer.
    peer: str | None = None
    #: "read" or "write", for an error of one request; so are the four below.
    op: str | None = None
    #: The local address.
    local: int | None = None
    #: The address in the peer's process.
    remote: int | None = None
    #: The length in bytes.
    length: int | None = None
    #: How many seconds after its submission it failed.
    elapsed: float | None = None
    #: Whether bytes of it had left, so that the remote range of a WRITE may still be written.
    sent: bool | None = None


class ConfigError(Error, ValueError):
    """A setting cannot be understood."""


class BadArgument(Error, ValueError):
    """An argument makes no sense; nothing was done."""


class BadName(Error, ValueError):
    """A name is no `host:port`, or its host has no address."""


class Overlap(Error, ValueError):
    """A range overlaps one that is registered, and is not the very same."""


class NotRegistered(Error, LookupError):
    """No buffer is registered at this address."""


class StillInUse(Error):
    """A buffer could not be unregistered: something still moves its bytes."""


class BadLocalAddress(Error, ValueError):
    """Local memory is not there, or, for what is registered as writable, cannot be written."""


class PeerUnreachable(Error, ConnectionError):
    """No connection to the peer could be made."""


class Refused(Error):
    """The range is in no buffer that the peer has registered."""


class ConnectionLost(Error, ConnectionError):
    """The connection was lost before a READ was complete, or before a WRITE had begun."""


class OutcomeUnknown(Error, ConnectionError):
    """The connection was lost when bytes of a WRITE had left and its answer had not come."""


class TimedOut(Error, TimeoutError):
    """The deadline passed."""


class Cancelled(Error):
    """The transfer was cancelled."""


class Unregistered(Error):
    """A local buffer was unregistered in mid-transfer."""


class ProtocolError(Error):
    """The peer, or what is in its place, says what is not understood."""


class NotifyFailed(Error):
    """All bytes are in place, but the notification was not delivered."""


class Busy(Error):
    """The queue to the peer is full, and the caller asked not to wait."""


class PortsExhausted(Error):
    """No port of the range is free."""


class Closed(Error):
    """The engine was closed."""


class ForkedProcess(Error, RuntimeError):
    """The engine was made before a fork, by the parent of this process."""


class DeviceError(Error):
    """A GPU, or its library, refuses something; `kind` says what."""
