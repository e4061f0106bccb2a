"""What the workers of a soak do: arenas at targets, and threads at initiators that move bytes and remember them.

It runs inside tests/worker.py. An initiator's thread has a region of the target's memory to itself and keeps an image of it: what
a completed WRITE has put there, all of it, must be what every later READ brings. After a WRITE that failed, nothing is known of
its range, and nothing will be in this arena: what was on its way may still arrive after a later one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import threading
import time
from dataclasses import dataclass, field

import numpy as np

#: Failures that faults of the network and the death of a peer explain. Whatever else is said is a finding.
EXPECTED = re.compile(
    "the connection was lost|no answer came|not complete at its deadline|cannot be reached|in no buffer that the peer has registered"
    "|the peer refused the range|cancelled|closed"
)
#: What the engine says where a simulated device is not given the processor for too long: it needs one, unlike a real one.
STARVED = re.compile("a copy on [a-z:0-9]+ does not end")
#: Bytes a thread may have on their way at once, and so the size of its local buffers.
SPAN = 22 << 20

# At the target


class Arena:
    """Registered memory, of the host or of a simulated GPU."""

    def __init__(self, state, name: str, size: int, gpu: bool):
        self.state, self.name, self.size, self.gpu = state, name, size, gpu
        if gpu:
            import gpu_jobs

            self.address = gpu_jobs.gpu_alloc(state, name, size)
        else:
            self.area = mmap.mmap(-1, size)
            self.view = np.frombuffer(self.area, dtype=np.uint8)
            self.address = self.view.ctypes.data
        # Touched at once: what a process has does not depend on which of it was used.
        self.write(0, np.zeros(size, dtype=np.uint8))

    def read(self, at: int, length: int) -> np.ndarray:
        if length == 0:
            return np.empty(0, dtype=np.uint8)
        if not self.gpu:
            return self.view[at : at + length]
        image = np.empty(length, dtype=np.uint8)
        assert self.state.gpu.read(self.address + at, image.ctypes.data, length) == 0
        return image

    def write(self, at: int, image: np.ndarray) -> None:
        if len(image) == 0:
            return
        if self.gpu:
            assert self.state.gpu.write(self.address + at, image.ctypes.data, len(image)) == 0
        else:
            self.view[at : at + len(image)] = image

    def come_to_rest(self) -> None:
        """Waits until the device has ended every copy that was asked of it, also those that the engine has given up."""
        import gpu_jobs

        context = gpu_jobs.PTR()
        gpu_jobs.vendor_call(self.state, "cuDevicePrimaryCtxRetain", ctypes.pointer(context), ctypes.c_int(0))
        gpu_jobs.vendor_call(self.state, "cuCtxSetCurrent", context)
        gpu_jobs.vendor_call(self.state, "cuCtxSynchronize")
        gpu_jobs.vendor_call(self.state, "cuDevicePrimaryCtxRelease_v2", ctypes.c_int(0))

    def free(self) -> None:
        if self.gpu:
            import gpu_jobs

            gpu_jobs.gpu_free(self.state, self.name)
        else:
            del self.view
            self.area.close()


def arenas(state) -> dict[str, Arena]:
    if not hasattr(state, "arenas"):
        state.arenas = {}
    return state.arenas


def make_arena(state, name, size, gpu=False) -> int:
    """Registers a new arena, all zeros; returns its address."""
    arena = arenas(state)[name] = Arena(state, name, size, gpu)
    code = state.engines["main"].register_memory(arena.address, size)
    assert code == 0, f"register_memory: {code}: {state.module.TransferEngine.last_error()}"
    return arena.address


def close_arena(state, name, images) -> dict:
    """Unregisters an arena and compares it with the images that its initiator has kept of it.

    Nobody may touch it after that: what is there now must be there when `drop_arena` looks again.
    """
    arena = arenas(state)[name]
    problems = let_go(state, arena)
    checked = 0
    for path, start in images:
        with np.load(path) as saved:
            image, known = saved["image"], saved["known"]
        os.unlink(path)
        found = arena.read(start, len(image))
        wrong = np.flatnonzero((found != image) & known)
        if len(wrong):
            at = int(wrong[0])
            problems.append(f"{name}: {len(wrong)} bytes are not what was written; byte {start + at} is {found[at]}, not {image[at]}")
        checked += int(np.count_nonzero(known))
    arena.digest = hash(arena.read(0, arena.size).tobytes())
    return {"problems": problems, "checked": checked}


def let_go(state, arena) -> list[str]:
    """Unregisters an arena; what went wrong. It must not be freed before: so it is tried again, and for a long time."""
    problems, began = [], time.monotonic()
    while code := state.engines["main"].unregister_memory(arena.address):
        took = time.monotonic() - began
        problems.append(f"unregister_memory of {arena.name}: {code} after {took:.1f} s: {state.module.TransferEngine.last_error()}")
        if took > 30:
            raise RuntimeError(problems[-1])
    return problems


def drop_arena(state, name) -> list[str]:
    arena = arenas(state).pop(name)
    same = arena.digest == hash(arena.read(0, arena.size).tobytes())
    arena.free()
    return [] if same else [f"{name}: bytes have changed after unregister_memory had returned"]


# At the initiator


@dataclass
class Tally:
    """What an initiator's threads have seen. Counted since the engine was made, where engines count it, too."""

    batches: int = 0
    completed: int = 0
    failed: int = 0
    entries_completed: int = 0
    entries_of_failed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_of_failed: int = 0

    def add(self, op: str, entries: int, length: int, good: bool) -> None:
        self.batches += 1
        if not good:
            self.failed += 1
            self.entries_of_failed += entries
            self.bytes_of_failed += length
            return
        self.completed += 1
        self.entries_completed += entries
        if op == "read":
            self.bytes_read += length
        else:
            self.bytes_written += length


@dataclass
class Place:
    """A thread's region of a target's arena."""

    name: str
    start: int
    image: np.ndarray
    known: np.ndarray
    address: int = 0
    #: False while the target is being replaced: what it says then is not compared.
    valid: bool = False
    epoch: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, name: str, address: int) -> None:
        with self.lock:
            self.name, self.address, self.valid = name, address + self.start, True
            self.epoch += 1
            self.image[:] = 0
            self.known[:] = True


class Load:
    """The threads of an initiator."""

    def __init__(self, state, seed, threads, timeout, gpu, pause):
        self.state, self.timeout, self.pause = state, timeout, pause
        self.lock = threading.Lock()
        #: Which engine it is, and what has been seen of each.
        self.generation = 0
        self.tallies = [Tally()]
        #: Bytes of completed batches, by target and operation.
        self.moved: dict[str, int] = {}
        self.verified = 0
        #: By how much a batch has ended after its deadline; negative if none has.
        self.latest = -timeout
        self.kinds: dict[str, int] = {}
        self.ways: dict[str, int] = {}
        self.problems: list[str] = []
        self.ending = threading.Event()
        self.workers = []
        pool = np.frombuffer(random.Random(seed).randbytes(SPAN + (1 << 20)), dtype=np.uint8)
        for number, region in enumerate(threads):
            local = Arena(state, f"local-{number}", min(SPAN, region), gpu)
            code = state.engines["main"].register_memory(local.address, local.size)
            assert code == 0, state.module.TransferEngine.last_error()
            self.workers.append(Worker(self, number, region, local, random.Random(f"{seed}/{number}"), pool))

    def problem(self, text: str) -> None:
        with self.lock:
            if len(self.problems) < 50:
                self.problems.append(text)


class Worker(threading.Thread):
    """One thread: a batch after the other, to one target or another."""

    def __init__(self, load: Load, number: int, region: int, local: Arena, rng: random.Random, pool: np.ndarray):
        super().__init__(daemon=True)
        self.error: str | None = None
        #: How the transfer before this one ended.
        self.last = "nothing"
        self.load, self.number, self.region, self.local, self.rng, self.pool = load, number, region, local, rng, pool
        self.places: dict[str, Place] = {}
        #: Held while a batch is on its way, so that others can wait until none is.
        self.busy = {}

    def add_place(self, key: str, start: int) -> None:
        image, known = np.zeros(self.region, dtype=np.uint8), np.ones(self.region, dtype=bool)
        self.busy[key] = threading.Lock()
        self.places[key] = Place("", start, image, known)

    def run(self) -> None:
        while not self.load.ending.is_set():
            key = self.rng.choice(sorted(self.places))
            try:
                with self.busy[key]:
                    self.one(key)
            except Exception as failure:
                self.load.problem(f"{type(failure).__name__}: {failure}")
            self.load.ending.wait(self.load.pause * self.rng.random() * 2)

    def sizes(self) -> list[int]:
        """The lengths of the entries of a batch, smaller than the region together."""
        rng, room = self.rng, self.local.size
        kind = rng.random()
        if kind < 0.35:
            lengths = [rng.randrange(4096) for _ in range(rng.randrange(1, 1001))]
        elif kind < 0.65:
            lengths = [rng.choice([1, 7, 24, 4095, 4096, 16384])] * rng.randrange(1, 200)
        elif kind < 0.92:
            lengths = [rng.randrange(64 << 10, 512 << 10) for _ in range(rng.randrange(1, 24))]
        else:
            lengths = [rng.randrange(1 << 20, max(room - 4096, (1 << 20) + 1))]
        kept, total = [], 0
        for length in lengths:
            if total + length > room - 4096:
                break
            kept.append(length)
            total += length
        return kept or [1]

    def layout(self, lengths: list[int], room: int) -> list[int]:
        """Where blocks lie that do not overlap, in an order of their own."""
        order = list(range(len(lengths)))
        self.rng.shuffle(order)
        gap = min(64, (room - sum(lengths)) // (len(lengths) + 1))
        at = self.rng.randrange(room - sum(lengths) - gap * len(lengths) + 1)
        places = [0] * len(lengths)
        for i in order:
            places[i] = at
            at += lengths[i] + (self.rng.randrange(gap + 1) if gap else 0)
        return places

    def one(self, key: str) -> None:
        place, op, lengths = self.places[key], self.rng.choice(["read", "write"]), self.sizes()
        near, far = self.layout(lengths, self.local.size), self.layout(lengths, self.region)
        with place.lock:
            name, address, epoch, valid = place.name, place.address, place.epoch, place.valid
        source = self.prepare(op, place, lengths, near, far)
        with self.load.lock:
            engine, generation = self.load.state.engines["main"], self.load.generation
        code, seconds, way = self.move(engine, op, name, address, lengths, near, far)
        self.judge(f"{way} {op} of {len(lengths)} entries, {sum(lengths)} bytes, to {key}", code, seconds, sum(lengths))
        with self.load.lock:
            self.load.tallies[generation].add(op, len(lengths), sum(lengths), code == 0)
            self.load.ways[way] = self.load.ways.get(way, 0) + 1
            if code == 0:
                self.load.moved[f"{key} {op}"] = self.load.moved.get(f"{key} {op}", 0) + sum(lengths)
        with place.lock:
            known = valid and place.valid and place.epoch == epoch
            self.settle(place, op, code == 0, known, source, lengths, near, far)
        self.last = f"{op}, {self.error if code else 'complete'}"

    def prepare(self, op: str, place: Place, lengths, near, far) -> list[np.ndarray]:
        """What is to be sent; or where it is to come, what is certainly not there."""
        source = []
        for length, here, there in zip(lengths, near, far):
            if op == "read":
                block = ~place.image[there : there + length]
            else:
                at = self.rng.randrange(len(self.pool) - length)
                block = self.pool[at : at + length]
            self.local.write(here, block)
            source.append(block)
        return source

    def move(self, engine, op, name, address, lengths, near, far):
        """Has the engine do it, one way or another: 0 or what it failed with, how long it took, and how it was asked."""
        locals_ = [self.local.address + at for at in near]
        remotes = [address + at for at in far]
        began = time.monotonic()
        if len(lengths) == 1 and self.rng.random() < 0.5:
            way = "single"
            code = getattr(engine, f"transfer_sync_{op}")(name, locals_[0], remotes[0], lengths[0])
        elif self.rng.random() < 0.5:
            way = "sync"
            code = getattr(engine, f"batch_transfer_sync_{op}")(name, locals_, remotes, lengths)
        else:
            way = "async"
            code = self.follow(engine, getattr(engine, f"batch_transfer_async_{op}")(name, locals_, remotes, lengths))
        if way != "async":
            self.error = engine.last_error()
        return code, time.monotonic() - began, way

    def follow(self, engine, id: int) -> int:
        """Asks about a batch until it has ended. Its id has ended with it."""
        self.error = engine.last_error()
        if id == 0:
            return -1
        until, pause = time.monotonic() + self.load.timeout + 30, threading.Event()
        while time.monotonic() < until:
            status = engine.transfer_check_status(id)
            if status:
                self.error = engine.last_error()
                if engine.transfer_check_status(id) != -1:
                    self.load.problem(f"a batch has ended with {status}, and later in another way")
                return 0 if status == 1 else status
            pause.wait(0.001)
        self.load.problem("a batch has not ended 30 s after its deadline")
        return -1

    def judge(self, what: str, code: int, seconds: float, total: int) -> None:
        load = self.load
        if code not in (0, -1, -2):
            load.problem(f"{what}: returned {code}")
        if code != 0:
            found = EXPECTED.search(self.error or "")
            if self.local.gpu and crowd() > 1:
                found = STARVED.search(self.error or "") or found
            if self.local.gpu:
                # A copy that was given up, or that an engine left behind which was closed, may still touch local memory.
                self.local.come_to_rest()
            kind = found.group(0) if found else "unexpected"
            with load.lock:
                load.kinds[kind] = load.kinds.get(kind, 0) + 1
            if not found:
                load.problem(f"{what}: {self.error!r}")
        late = seconds - load.timeout - total * 10e-9
        with load.lock:
            load.latest = max(load.latest, late)
        if late > slack():
            load.problem(f"{what}: ended {late:.2f} s after its deadline: {self.error!r}")

    def settle(self, place: Place, op, good: bool, known: bool, source, lengths, near, far) -> None:
        """Compares what can be compared, and remembers what is known now."""
        for block, length, here, there in zip(source, lengths, near, far):
            image, sure = place.image[there : there + length], place.known[there : there + length]
            found = self.local.read(here, length)
            if op == "write":
                if not np.array_equal(found, block):
                    self.load.problem(
                        f"WRITE of {length} bytes has changed its own source, {'of the device' if self.local.gpu else 'of the host'}; before it: {self.last}"
                    )
                if not known:
                    continue
                if good:
                    image[:] = block
                else:
                    sure[:] = False
            elif good and known:
                wrong = np.flatnonzero((found != image) & sure)
                if len(wrong):
                    at = int(wrong[0])
                    self.load.problem(
                        f"READ of {length} bytes at {there} of {place.name}: {len(wrong)} wrong, byte {at} is {found[at]}, not {image[at]}"
                    )
            if good and known:
                with self.load.lock:
                    self.load.verified += length


# Commands for the initiator


def crowd() -> float:
    """How many want each processor."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def slack() -> float:
    """What is allowed after a deadline: half a second, and more when others keep the machine busy."""
    return 0.5 * min(4.0, max(1.0, crowd()))


def begin(state, seed, threads, timeout, gpu=False, pause=0.02):
    """Makes the threads; `threads` has the size of the region of each. `go` starts them."""
    state.load = Load(state, seed, threads, timeout, gpu, pause)


def add_target(state, key):
    start = 0
    for worker in state.load.workers:
        worker.add_place(key, start)
        start += worker.region
    return start


def go(state):
    for worker in state.load.workers:
        worker.start()


def renew(state, key, name, address):
    """From now on the target is called so, and has a new arena there."""
    for worker in state.load.workers:
        worker.places[key].renew(name, address)


def doubt(state, key):
    """From now on nothing is compared that comes from this target: it is about to end."""
    for worker in state.load.workers:
        with worker.places[key].lock:
            worker.places[key].valid = False


def unknown(state, key) -> float:
    """The largest share of a region of which nothing is known any more."""
    return max(1 - np.count_nonzero(w.places[key].known) / w.region for w in state.load.workers)


def hold(state, key, folder, seconds):
    """Waits until no batch to this target is on its way and lets no other begin; saves the images."""
    images = []
    for worker in state.load.workers:
        if not worker.busy[key].acquire(timeout=seconds):
            raise RuntimeError(f"a batch to {key} has not ended within {seconds} s")
        place = worker.places[key]
        path = os.path.join(folder, f"{os.getpid()}-{key}-{worker.number}.npz")
        np.savez(path, image=place.image, known=place.known & place.valid)
        images.append([path, place.start])
    return images


def release(state, key):
    for worker in state.load.workers:
        worker.busy[key].release()


def reopen(state):
    """Closes the engine while transfers run, which cancels them, and makes another."""
    old = state.engines["main"]
    began = time.monotonic()
    old.close()
    took = time.monotonic() - began
    if took > 1.0 + slack():
        state.load.problem(f"close took {took:.2f} s")
    made = state.module.TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    for worker in state.load.workers:
        code = made.register_memory(worker.local.address, worker.local.size)
        assert code == 0, state.module.TransferEngine.last_error()
    with state.load.lock:
        state.engines["main"] = made
        state.load.generation += 1
        state.load.tallies.append(Tally())


def finish(state, seconds):
    """Ends the threads; what they have seen, and what the engine has counted meanwhile."""
    load = state.load
    load.ending.set()
    for worker in load.workers:
        worker.join(seconds)
        if worker.is_alive():
            load.problem("a thread has not ended")
    starved = sum(count for kind, count in load.kinds.items() if STARVED.fullmatch(kind))
    if starved > 5 + sum(tally.batches for tally in load.tallies) // 200:
        load.problem(f"copies did not end in {starved} batches, which is more than a crowded machine explains")
    return so_far(state)


def so_far(state):
    load = state.load
    with load.lock:
        total = Tally()
        for tally in load.tallies:
            for name, value in vars(tally).items():
                setattr(total, name, getattr(total, name) + value)
        return {
            "seen": dict(vars(total)),
            "seen_of_this_engine": dict(vars(load.tallies[-1])),
            "engines": len(load.tallies),
            "moved": dict(load.moved),
            "verified": load.verified,
            "kinds": dict(load.kinds),
            "ways": dict(load.ways),
            "latest": load.latest,
            "problems": list(load.problems),
            "stats": state.engines["main"].stats(),
        }
