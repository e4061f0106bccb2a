"""Functions that the tests run inside a worker, by name. Each takes the worker's state and keyword arguments."""

from __future__ import annotations

import os
import threading
import time
import zlib

import numpy as np
import pattern

# Completed means applied (test_completion.py)


def read_exactly(fd: int, length: int) -> bytes:
    got = b""
    while len(got) < length:
        part = os.read(fd, length - len(got))
        if not part:
            raise EOFError("the side pipe was closed")
        got += part
    return got


def serve_side_pipe(state, requests, answers, buffer, start, length, seeds):
    """For each byte on the pipe `requests`: if the top bit is clear, checks that the range now is pattern `seeds[byte]`;
    if it is set, fills the range with it. Answers one byte: 1 is good, 0 torn. Runs until 0xff."""
    view = state.view(buffer, start, length)
    images = [pattern.pattern(seed, 0, length) for seed in seeds]
    snapshot = np.empty(length, dtype=np.uint8)
    torn = 0
    while (order := read_exactly(requests, 1)[0]) != 0xFF:
        image = images[order & 0x7F]
        if order & 0x80:
            view[:] = image
            good = True
        else:
            # From the end, where the last bytes of a write that was called complete too early would be missing.
            np.copyto(snapshot[::-1], view[::-1])
            good = np.array_equal(snapshot, image)
        torn += not good
        os.write(answers, bytes([good]))
    return torn


def write_rounds(state, requests, answers, target, local, remote, length, rounds, seeds, engine="main"):
    """WRITEs in turn the pattern of each seed; at completion the receiver looks at once. Counts failures and torn writes."""
    te, address = state.engines[engine], state.address(local)
    areas = []
    for n, seed in enumerate(seeds):
        pattern.fill(state.view(local, n * length, length), seed)
        areas.append(address + n * length)
    failed = torn = 0
    for r in range(rounds):
        n = r % len(seeds)
        if te.transfer_sync_write(target, areas[n], remote, length) != 0:
            failed += 1
            continue
        os.write(requests, bytes([n]))
        torn += read_exactly(answers, 1) != b"\x01"
    os.write(requests, b"\xff")
    return {"failed": failed, "torn": torn}


def read_rounds(state, requests, answers, target, local, remote, length, rounds, seeds, engine="main"):
    """READs a range whose owner fills it anew before each round, and looks at the local bytes at completion."""
    te, view = state.engines[engine], state.view(local, 0, length)
    images = [pattern.pattern(seed, 0, length) for seed in seeds]
    snapshot = np.empty(length, dtype=np.uint8)
    failed = torn = 0
    for r in range(rounds):
        n = r % len(seeds)
        os.write(requests, bytes([n | 0x80]))
        read_exactly(answers, 1)
        if te.transfer_sync_read(target, state.address(local), remote, length) != 0:
            failed += 1
            continue
        np.copyto(snapshot[::-1], view[::-1])
        torn += not np.array_equal(snapshot, images[n])
    os.write(requests, b"\xff")
    return {"failed": failed, "torn": torn}


def make_noise(state, target, local, remote, length, threads):
    """Starts threads that write without end, an engine each, until `stop_noise`."""
    stop = threading.Event()
    counts = [0] * threads

    def run(n):
        te = state.engines[f"noise{n}"]
        at = n * length
        while not stop.is_set():
            if te.transfer_sync_write(target, state.address(local, at), remote + at, length) == 0:
                counts[n] += 1

    running = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(threads)]
    state.marks["noise"] = (stop, running, counts)
    for thread in running:
        thread.start()


def stop_noise(state):
    stop, running, counts = state.marks.pop("noise")
    stop.set()
    for thread in running:
        thread.join(60)
    return counts


def watch_status(state, id, seconds, engine="main"):
    """Asks for the status for so long, or until it is final. Returns every status seen, and when the last one was."""
    te, seen, pause = state.engines[engine], set(), threading.Event()
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        status = te.transfer_check_status(id)
        seen.add(status)
        if status != 0:
            break
        pause.wait(0.002)
    return {"seen": sorted(seen), "seconds": now}


def submit_and_watch(state, target, local, remote, length, seconds, engine="main"):
    """Submits one WRITE and polls it to its final state."""
    te, pause = state.engines[engine], threading.Event()
    end = time.monotonic() + seconds
    id = te.transfer_submit_write(target, local, remote, length)
    if id == 0:
        return {"status": "no id"}
    while (status := te.transfer_check_status(id)) == 0 and time.monotonic() < end:
        pause.wait(0.002)
    return {"status": status}


def write_many(state, target, local, remote, length, times, engine="main"):
    """How many of so many WRITEs (or READs) of one range failed."""
    te = state.engines[engine]
    codes = [te.transfer_sync_write(target, local, remote, length) for _ in range(times)]
    codes += [te.transfer_sync_read(target, local, remote, length) for _ in range(times)]
    return {"write": sum(c != 0 for c in codes[:times]), "read": sum(c != 0 for c in codes[times:])}


# Registration


def register_many(state, buffer, count, stride, length, engine="main"):
    """Registers a region at every `stride` bytes; returns the seconds it took and the codes that were not 0."""
    te, base = state.engines[engine], state.address(buffer)
    start = time.monotonic()
    codes = [te.register_memory(base + n * stride, length) for n in range(count)]
    return {"seconds": time.monotonic() - start, "bad": [c for c in codes if c != 0][:5]}


def unregister_many(state, buffer, count, stride, engine="main"):
    te, base = state.engines[engine], state.address(buffer)
    start = time.monotonic()
    codes = [te.unregister_memory(base + n * stride) for n in range(count)]
    return {"seconds": time.monotonic() - start, "bad": [c for c in codes if c != 0][:5]}


# Bulk


def grid(state, op, target, local, remote, block, count, engine="main", way="sync"):
    """One batch of `count` blocks side by side. Reports the growth of the peak resident size over that before the call."""
    te, base = state.engines[engine], state.address(local)
    locals_ = [base + n * block for n in range(count)]
    remotes = [remote + n * block for n in range(count)]
    lengths = [block] * count
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    start = time.monotonic()
    value = getattr(te, f"batch_transfer_{way}_{op}")(target, locals_, remotes, lengths)
    seconds = time.monotonic() - start
    ask = getattr(state.module.TransferEngine, "last_error", lambda: None)
    return {"value": value, "grown_kib": memory("VmHWM") - before, "seconds": seconds, "error": ask()}


def memory(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":"))


def grid_threads(state, op, target, local, remote, block, count, threads, engine="main"):
    """The same from many threads at once, each with its own part of the memory."""
    results = [None] * threads

    def run(n):
        at = n * block * count
        base, far = state.address(local, at), remote + at
        call = getattr(state.engines[engine], f"batch_transfer_sync_{op}")
        lists = [base + i * block for i in range(count)], [far + i * block for i in range(count)], [block] * count
        results[n] = call(target, *lists)

    running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return {"values": results, "grown_kib": memory("VmHWM") - before}


def verified_threads(state, target, local, remote, share, threads, rounds, engine="main"):
    """Each thread: WRITE random bytes from its first half, READ them back into its second half, compare. Lists what went wrong."""
    te, wrong = state.engines[engine], []

    def run(n):
        rng = np.random.default_rng(n)
        half = share // 2
        mine = state.view(local, n * share, share)
        base, far = state.address(local, n * share), remote + n * half
        for r in range(rounds):
            length = int(rng.integers(1, 65537 if r % 4 else 9))
            at, back = (int(v) for v in rng.integers(0, half - length, 2))
            mine[at : at + length] = np.frombuffer(rng.bytes(length), dtype=np.uint8)
            codes = (
                te.transfer_sync_write(target, base + at, far + at, length),
                te.transfer_sync_read(target, base + half + back, far + at, length),
            )
            same = np.array_equal(mine[at : at + length], mine[half + back : half + back + length])
            if codes != (0, 0) or not same:
                wrong.append([n, r, length, codes, bool(same)])
                return

    running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return wrong


def rest_and_digest(state, seconds, buffer):
    threading.Event().wait(seconds)
    return zlib.crc32(state.view(buffer))


# Bad input


def made_up_ids(state, count, engine="main"):
    """Asks for the status of ids that were never given out. Returns the answers that are not -1."""
    te, rng = state.engines[engine], np.random.default_rng(7)
    ids = [0, 1, 12345, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    ids += [int(i) for i in rng.integers(0, 2**64 - 1, count // 2, dtype=np.uint64)]
    ids += [int(i) for i in rng.integers(0, 1 << 20, count - len(ids))]
    odd = [[i, te.transfer_check_status(i)] for i in ids]
    odd += [[i, te.get_batch_transfer_status([i])] for i in ids[:1000]]
    return {"odd": [o for o in odd if o[1] != -1][:5], "asked": len(ids)}


def try_settings(state, settings):
    """Makes an engine under each setting; returns its code and what it says."""
    answers = []
    for name, value in settings:
        os.environ[name] = value
        try:
            engine = state.module.TransferEngine()
            code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
            error = state.module.TransferEngine.last_error() if code else None
            del engine
        finally:
            del os.environ[name]
        answers.append([name, value, code, error])
    return answers


# Defects of the peer


def own_network(state, ports):
    """Moves this thread, and those it starts, into a network of its own, with so many ports to connect from of which none
    is used again while a connection lingers. Returns what does not work."""
    import ctypes
    import fcntl
    import socket
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000):  # CLONE_NEWNET
        return f"no network namespace: {os.strerror(ctypes.get_errno())}"
    try:
        for name, value in (("tcp_tw_reuse", "0"), ("ip_local_port_range", f"40000 {40000 + ports - 1}")):
            with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
                file.write(value)
    except OSError as failure:
        return f"the ports cannot be set: {failure}"
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
    return None


def connections_made(state):
    """How many connections have been made in this network."""
    with open("/proc/thread-self/net/snmp") as file:
        names, values = (line.split() for line in file if line.startswith("Tcp:"))
    return int(values[names.index("ActiveOpens")])


def longest_silence(state, method, args, engine="main"):
    """Calls a method while another thread wakes every millisecond: the longest time it did not, and what the call took."""
    silence, stop, running = [0.0], threading.Event(), threading.Event()

    def tick():
        last = time.monotonic()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            silence[0], last = max(silence[0], now - last), now
            running.set()

    thread = threading.Thread(target=tick)
    thread.start()
    running.wait()
    silence[0] = 0.0
    start = time.monotonic()
    value = getattr(state.engines[engine], method)(*args)
    seconds = time.monotonic() - start
    # Once more, after whatever it has waited for.
    running.clear()
    running.wait()
    stop.set()
    thread.join()
    return {"silence": silence[0], "seconds": seconds, "value": value}


def refused_batches(state, times, target, local, remote, length, count, engine="main"):
    """Batches of which the last entry is refused; every second one is not waited for. Returns the KiB that they cost."""
    te, before = state.engines[engine], memory("VmRSS")
    remotes = [remote] * (count - 1) + [0x10]
    ids = []
    for n in range(times):
        if n % 2:
            assert te.batch_transfer_sync_write(target, [local] * count, remotes, [length] * count) == -1
        else:
            ids.append(te.batch_transfer_async_write(target, [local] * count, remotes, [length] * count))
    assert all(ids) and te.get_batch_transfer_status(ids) == -1
    return memory("VmRSS") - before


# A good guest


def count_during(state, thread_seconds, method, args, engine="main"):
    """How fast a counting thread goes alone, and while this thread is inside a blocking call."""
    ticks = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1

    counting = threading.Thread(target=count)
    counting.start()
    start = time.monotonic()
    threading.Event().wait(thread_seconds)
    alone = ticks[0] / (time.monotonic() - start)
    before, start = ticks[0], time.monotonic()
    value = getattr(state.engines[engine], method)(*args)
    seconds = time.monotonic() - start
    during = (ticks[0] - before) / seconds
    stop.set()
    counting.join()
    return {"alone": alone, "during": during, "seconds": seconds, "value": value}


def strange_bytes(state, buffer, seeds):
    """How many bytes are in none of these patterns, each at its place."""
    view = state.view(buffer)
    strange = np.ones(len(view), dtype=bool)
    for seed in seeds:
        strange &= view != pattern.pattern(seed, 0, len(view))
    return int(strange.sum())


def repeat_batch(state, op, target, local, remote, length, count, engine="main"):
    """One batch of the same range over and over."""
    call = getattr(state.engines[engine], f"batch_transfer_sync_{op}")
    value = call(target, [local] * count, [remote] * count, [length] * count)
    ask = getattr(state.module.TransferEngine, "last_error", lambda: None)
    return {"value": value, "error": ask()}


def hole(state, size):
    """An address range of which the first byte is mapped by nobody, behind mapped memory."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    start = libc.mmap(None, size + 4096, 3, 0x22, -1, 0)
    libc.munmap(start + 4096, size)
    # Nobody else may move in, as an allocator would: reserved, with no access.
    libc.mmap(start + 4096, size, 0, 0x22 | 0x10, -1, 0)
    return start + 4096


# The drop-in


def surface(state):
    """The names of the module and of the engine class, with documentation and signatures of its methods."""
    import inspect

    cls = state.module.TransferEngine
    methods = {}
    signatures = {}
    for name in dir(cls):
        if name.startswith("_") or not callable(getattr(cls, name)) or isinstance(getattr(cls, name), type):
            continue
        method = getattr(cls, name)
        methods[name] = (method.__doc__ or "").split("\n")[0]
        try:
            parameters = list(inspect.signature(method).parameters.values())
        except (TypeError, ValueError):
            continue
        shown = [[p.name, None if p.default is p.empty else repr(p.default), p.kind.name] for p in parameters]
        signatures[name] = shown[1:] if shown and shown[0][0] in ("self", "$self") else shown
    names = [n for n in dir(state.module) if not n.startswith("_")]
    values = {n: getattr(state.module, n) for n in names if n.startswith("SUPPORT_")}
    return {"module": names, "methods": methods, "signatures": signatures, "values": values}


def small_classes(state):
    m = state.module
    opcode, notify = m.TransferOpcode, m.TransferNotify
    written = notify()
    written.name, written.msg = "x", "y"
    return {
        "ints": [int(opcode.Read), int(opcode.Write)],
        "exported": m.Read == opcode.Read and m.Write == opcode.Write,
        "nested": m.TransferEngine.TransferOpcode is opcode,
        "equal": opcode.Read == opcode.Read and opcode.Read != opcode.Write,
        "names": [opcode.Read.name, opcode.Write.name],
        "empty": [notify().name, notify().msg],
        "filled": [notify("n", "m").name, notify("n", "m").msg],
        "by-name": [notify(name="n", msg="m").name, notify(name="n", msg="m").msg],
        "written": [written.name, written.msg],
        "hashable": len({opcode.Read, opcode.Write, opcode.Read}) == 2,
    }


def rest(state, seconds):
    threading.Event().wait(seconds)


def come_and_go(state, times):
    """Makes two engines, moves a few bytes between them, and drops both; again and again."""
    import gc

    area = np.zeros(8192, dtype=np.uint8)
    at = area.ctypes.data
    for _ in range(times):
        a, b = state.module.TransferEngine(), state.module.TransferEngine()
        for engine in (a, b):
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert b.register_memory(at, 8192) == 0
        assert a.transfer_sync_write(f"127.0.0.1:{b.get_rpc_port()}", at, at + 4096, 4096) == 0
        del a, b
        gc.collect()


# Faults (scripts/faults)


def timed_batch(state, op, target, lists, engine="main"):
    """One batch of each range of `lists`: seconds, code, and the text if it failed."""
    call = getattr(state.engines[engine], f"batch_transfer_sync_{op}")
    start = time.monotonic()
    code = call(target, *lists)
    seconds = time.monotonic() - start
    return seconds, code, state.module.TransferEngine.last_error() if code else None


def batches_after_gaps(state, groups, local, remote, length, count, engine="main"):
    """For each group of peers, all at the same time: a batch, then `cycles` times a gap and a batch; READs and WRITEs by
    turns. Returns for each group the seconds of every batch that came after a gap, and the texts of those that failed."""
    base = state.address(local)
    lists = [base + n * length for n in range(count)], [remote + n * length for n in range(count)], [length] * count
    results = [{"seconds": [], "failed": []} for _ in groups]

    def run(group, result, target, delay):
        pause = threading.Event()
        pause.wait(delay)
        for cycle in range(group["cycles"] + 1):
            seconds, code, text = timed_batch(state, ["read", "write"][cycle % 2], target, lists, engine)
            if code:
                result["failed"].append(text)
            if cycle:
                result["seconds"].append(seconds)
            if cycle < group["cycles"]:
                pause.wait(group["gap"])

    running = []
    for group, result in zip(groups, results):
        # Not all at once: what is measured is one transfer and not the crowd.
        step = min(group["gap"], 20) / len(group["targets"])
        for n, target in enumerate(group["targets"]):
            running.append(threading.Thread(target=run, args=(group, result, target, n * step)))
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return results


def transfers_from_threads(state, targets, local, length, threads, each, engine="main"):
    """`each` READs and WRITEs from each thread to all targets by turns, which are (name, address). Returns what failed."""
    te, failed = state.engines[engine], []

    def run(n):
        here = state.address(local, n * length)
        for i in range(each):
            name, remote = targets[(n + i) % len(targets)]
            call = te.transfer_sync_read if i % 4 >= 2 else te.transfer_sync_write
            if call(name, here, remote + n * length, length) != 0:
                failed.append(state.module.TransferEngine.last_error())

    running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return {"failed": len(failed), "texts": failed[:3]}


def limit_files(state, count):
    """From now on this process may have so many descriptors."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def write_until_stopped(state, target, local, remote, length, engine="main"):
    """Starts a thread that writes the range again and again, until `stop_writing`."""
    te, stop, texts = state.engines[engine], threading.Event(), {}

    def run():
        while not stop.is_set():
            if te.transfer_sync_write(target, state.address(local), remote, length) == 0:
                texts["done"] = texts.get("done", 0) + 1
            else:
                # Without the numbers in it: one for each kind of failure.
                text = "".join(c for c in state.module.TransferEngine.last_error() if not c.isdigit())
                texts[text] = texts.get(text, 0) + 1
                stop.wait(0.001)

    thread = threading.Thread(target=run, daemon=True)
    state.marks["writing"] = stop, thread, texts
    thread.start()


def stop_writing(state):
    stop, thread, texts = state.marks.pop("writing")
    stop.set()
    thread.join(60)
    return texts


def write_until_done(state, target, local, remote, length, seconds, engine="main"):
    """Writes the range again and again until it succeeds; after how long it did, and what the failures said."""
    te, start, pause, text = state.engines[engine], time.monotonic(), threading.Event(), None
    while time.monotonic() - start < seconds:
        if te.transfer_sync_write(target, state.address(local), remote, length) == 0:
            return {"seconds": time.monotonic() - start, "text": text}
        text = state.module.TransferEngine.last_error()
        pause.wait(0.005)
    return {"seconds": None, "text": text}


def steady_writes(state, targets, local, length, seconds, engine="main"):
    """A thread for each target, which are (name, address), writes its range for so long. Rate in bytes per second, p99, failures,
    and the processor time of a write, which does not depend on how busy the machine is."""
    te, times, failed = state.engines[engine], [], []

    def run(n):
        name, remote = targets[n]
        here, end = state.address(local, n * length), time.monotonic() + seconds
        while (start := time.monotonic()) < end:
            if te.transfer_sync_write(name, here, remote, length) != 0:
                failed.append(state.module.TransferEngine.last_error())
            times.append(time.monotonic() - start)

    running = [threading.Thread(target=run, args=(n,)) for n in range(len(targets))]
    cpu = time.process_time()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    cpu = (time.process_time() - cpu) / len(times)
    times.sort()
    p99 = times[len(times) * 99 // 100]
    return {"rate": len(times) * length / seconds, "p99": p99, "cpu": cpu, "failed": failed[:3]}


def submit_many(state, target, local, remote, length, count, engine="main"):
    """So many WRITEs that are not waited for; returns their ids."""
    te, here = state.engines[engine], state.address(local)
    return [te.transfer_submit_write(target, here, remote, length) for _ in range(count)]
