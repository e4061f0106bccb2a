"""Each engine as its own users call it. A class has the memory of one end, and moves the blocks of a work."""

from __future__ import annotations

import os

from comparing.works import INITIATOR, TARGET, Work


class Engine:
    """What all have. `prepare` returns the call that is measured; it raises where a transfer fails."""

    def __init__(self, memory, end: str):
        self.memory, self.end = memory, end
        self.peer = None

    def hello(self):
        """What the other end has to be told."""

    def meet(self, peer, place: str) -> None:
        """The other end's hello, and a name for both to meet at."""
        self.peer = peer

    def prepare(self, work: Work, op: str):
        raise NotImplementedError

    def finish(self) -> None:
        """After the last call of a run."""

    def serve(self) -> None:
        """What the target has to do while the initiator calls."""


class Mooncake(Engine):
    """mooncake.engine's TransferEngine, or ours in its place: synchronous calls with lists of addresses."""

    MODULE = "mooncake.engine"

    def __init__(self, memory, end: str):
        import importlib

        super().__init__(memory, end)
        self.kind = importlib.import_module(self.MODULE).TransferEngine
        self.engine = self.kind()
        self.must(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        self.must(self.engine.register_memory(memory.address, memory.size), "register_memory")

    def must(self, code: int, what: str) -> None:
        if code != 0:
            why = getattr(self.kind, "last_error", lambda: "no more is known")()
            raise RuntimeError(f"{what} returned {code}: {why}")

    def hello(self):
        return {"name": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.memory.address}

    def prepare(self, work: Work, op: str):
        if self.end == TARGET:
            return None
        name, one = self.peer["name"], work.count == 1
        method = f"{'' if one else 'batch_'}transfer_sync_{op}"
        call = getattr(self.engine, method)
        here = (self.memory.address + work.stride * work.slots(INITIATOR)).tolist()
        there = (self.peer["address"] + work.stride * work.slots(TARGET)).tolist()
        args = (name, here[0], there[0], work.block) if one else (name, here, there, [work.block] * work.count)

        def go():
            code = call(*args)
            if code != 0:
                self.must(code, method)

        return go


class Tensorferry(Mooncake):
    MODULE = "tensorferry.mooncake"


class Nixl(Engine):
    """NIXL over UCX: descriptors and the transfer are prepared, a call posts it and asks until it is done."""

    def __init__(self, memory, end: str):
        from nixl_cu12 import nixl_agent, nixl_agent_config

        super().__init__(memory, end)
        self.agent = nixl_agent(end, nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(memory.address, memory.size, 0, "")], "DRAM")
        self.handle = None

    def hello(self):
        return {"metadata": self.agent.get_agent_metadata().hex(), "address": self.memory.address}

    def meet(self, peer, place: str) -> None:
        super().meet(peer, place)
        if self.end == INITIATOR:
            name = self.agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
            self.name = name.decode() if isinstance(name, bytes) else name

    def prepare(self, work: Work, op: str):
        if self.end == TARGET:
            return None
        if self.handle is not None:
            self.agent.release_xfer_handle(self.handle)
        here = self.descriptors(self.memory.address, work, INITIATOR)
        there = self.descriptors(self.peer["address"], work, TARGET)
        self.handle = handle = self.agent.initialize_xfer(op.upper(), here, there, self.name)
        post, ask = self.agent.transfer, self.agent.check_xfer_state

        def go():
            state = post(handle)
            while state == "PROC":
                state = ask(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")

        return go

    def descriptors(self, base: int, work: Work, end: str):
        return self.agent.get_xfer_descs([(base + at, work.block, 0) for at in (work.stride * work.slots(end)).tolist()], "DRAM")


class Gloo(Engine):
    """Gloo's messages, one for each batch: what is scattered is gathered before it and scattered after it.

    So do its users, since each message costs a round trip before its payload. There are no one-sided transfers, so the target takes part:
    the initiator sends a word ahead of each batch, which says that there is one, and after a WRITE the target answers with a word when all
    is in place, without which a `send` only says that the local memory can be used again.

    The binding is xoscar's, which is Gloo and little else; that of PyTorch comes with gigabytes for GPUs.
    """

    def __init__(self, memory, end: str):
        import importlib.util
        import sys

        import numpy as np

        # The binding alone: the package around it would want to have more installed.
        sys.path += [f"{folder}/collective" for folder in importlib.util.find_spec("xoscar").submodule_search_locations]
        import xoscar_pygloo

        super().__init__(memory, end)
        self.gloo, self.kind = xoscar_pygloo, xoscar_pygloo.GlooDataType_t.glooUint8
        self.rank, self.other = (0, 1) if end == INITIATOR else (1, 0)
        self.np, self.word = np, np.zeros(1, dtype=np.int64)

    def meet(self, peer, place: str) -> None:
        os.makedirs(place, exist_ok=True)
        self.context = self.gloo.rendezvous.Context(self.rank, 2)
        device = self.gloo.transport.tcp.CreateDevice(self.gloo.transport.tcp.attr("127.0.0.1"))
        store = self.gloo.rendezvous.PrefixStore("pair", self.gloo.rendezvous.FileStore(place))
        self.context.connectFullMesh(store, device)

    def prepare(self, work: Work, op: str):
        self.op, self.length, self.flat = op, work.payload, None
        if work.scattered:
            block = f"V{work.block}"
            self.flat = self.np.zeros(work.count, dtype=block)
            self.places = work.slots(self.end) * (work.stride // work.block)
            self.pages = self.memory.view[: work.span].view(block)
        self.address = self.memory.address if self.flat is None else self.flat.ctypes.data
        return self.write if op == "write" else self.read

    def put(self) -> None:
        if self.flat is not None:
            self.np.take(self.pages, self.places, out=self.flat, mode="clip")
        self.gloo.send(self.context, self.address, self.length, self.kind, self.other)

    def get(self) -> None:
        self.gloo.recv(self.context, self.address, self.length, self.kind, self.other)
        if self.flat is not None:
            self.pages[self.places] = self.flat

    def say(self, value: int) -> None:
        self.word[0] = value
        self.gloo.send(self.context, self.word.ctypes.data, 8, self.kind, self.other)

    def hear(self) -> int:
        self.gloo.recv(self.context, self.word.ctypes.data, 8, self.kind, self.other)
        return int(self.word[0])

    def write(self) -> None:
        self.say(1)
        self.put()
        self.hear()

    def read(self) -> None:
        self.say(1)
        self.get()

    def finish(self) -> None:
        self.say(0)

    def serve(self) -> None:
        while self.hear():
            if self.op == "write":
                self.get()
                self.say(1)
            else:
                self.put()
