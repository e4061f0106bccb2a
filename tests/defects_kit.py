"""What the tests of the peer's defects share."""

from __future__ import annotations

import pytest
from peers import OURS, PEER, EngineProcess

TARGETS = pytest.mark.parametrize("kind", [OURS, PEER])


class Ends:
    """Our initiator, and a target of either kind."""

    def __init__(self, kind, size, **env):
        self.target = EngineProcess(kind)
        self.initiator = EngineProcess(OURS, env)
        self.target.open()
        self.initiator.open()
        self.far = self.target.alloc("mem", size, seed=1, register=True)
        self.near = self.initiator.alloc("mem", size, seed=2, register=True)

    def write(self, at=0, length=16, remote=None):
        far = self.far + at if remote is None else remote
        return self.initiator.te("transfer_sync_write", self.target.name, self.near + at, far, length)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.initiator.close()
        self.target.close()
