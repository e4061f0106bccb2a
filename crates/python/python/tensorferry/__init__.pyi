from collections.abc import Sequence
from typing import Any

from tensorferry._errors import BadArgument as BadArgument
from tensorferry._errors import BadLocalAddress as BadLocalAddress
from tensorferry._errors import BadName as BadName
from tensorferry._errors import Busy as Busy
from tensorferry._errors import Cancelled as Cancelled
from tensorferry._errors import Closed as Closed
from tensorferry._errors import ConfigError as ConfigError
from tensorferry._errors import ConnectionLost as ConnectionLost
from tensorferry._errors import DeviceError as DeviceError
from tensorferry._errors import Error as Error
from tensorferry._errors import ForkedProcess as ForkedProcess
from tensorferry._errors import NotifyFailed as NotifyFailed
from tensorferry._errors import NotRegistered as NotRegistered
from tensorferry._errors import OutcomeUnknown as OutcomeUnknown
from tensorferry._errors import Overlap as Overlap
from tensorferry._errors import PeerUnreachable as PeerUnreachable
from tensorferry._errors import PortsExhausted as PortsExhausted
from tensorferry._errors import ProtocolError as ProtocolError
from tensorferry._errors import Refused as Refused
from tensorferry._errors import StillInUse as StillInUse
from tensorferry._errors import TimedOut as TimedOut
from tensorferry._errors import Unregistered as Unregistered
from tensorferry._native import Buffer as Buffer
from tensorferry._native import Engine as Engine
from tensorferry._native import Notification as Notification
from tensorferry._native import Registration as Registration
from tensorferry._native import Segment as Segment
from tensorferry._native import Transfer as Transfer
from tensorferry._native import __version__ as __version__

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

def doctor(*, require: str | Sequence[str] = (), move: bool = False) -> dict[str, Any]: ...
