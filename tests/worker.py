"""The process at one end of a test: imports an engine module and obeys the test, one JSON line per command.

Commands come on standard input; replies leave on what was standard output, which is closed to everybody else, so that an
engine that prints does not garble them. Any end of the input is the end of the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import logging
import mmap
import os
import resource
import signal
import sys
import threading
import time

REPLIES = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)


class State:
    """What the commands work on."""

    def __init__(self, module):
        self.module = module
        self.engines = {}
        self.buffers = {}
        self.maps = []
        self.threads = {}
        self.logs = []
        self.marks = {}
        self.gpu = None

    def view(self, name, start=0, length=None):
        whole = self.buffers[name]
        return whole[start:] if length is None else whole[start : start + length]

    def address(self, name, offset=0):
        return self.buffers[name].ctypes.data + offset


class Collect(logging.Handler):
    """Keeps every record: the tests ask for them."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def emit(self, record):
        self.kept.append([record.name, record.levelname, record.getMessage()])


def decode(value, state):
    """Python values that JSON has no form for."""
    if isinstance(value, list):
        return [decode(v, state) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value["$"]
    if kind == "opcode":
        return getattr(state.module.TransferOpcode, value["name"])
    if kind == "notify":
        return state.module.TransferNotify(value["name"], value["msg"])
    if kind == "bytes":
        return bytes.fromhex(value["hex"])
    if kind == "tuple":
        return tuple(decode(v, state) for v in value["items"])
    if kind == "object":
        return object()
    import numpy as np

    if kind == "np":
        return np.dtype(value["dtype"]).type(value["value"])
    if kind == "nparray":
        return np.array(value["items"], dtype=value["dtype"])
    if kind == "nplist":
        return [np.dtype(value["dtype"]).type(v) for v in value["items"]]
    raise ValueError(f"unknown value {kind}")


def encode(value, state):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"$": "bytes", "hex": value.hex()}
    if isinstance(value, (list, tuple)):
        return [encode(v, state) for v in value]
    if isinstance(value, dict):
        return {str(k): encode(v, state) for k, v in value.items()}
    notify = getattr(state.module, "TransferNotify", None)
    if notify is not None and isinstance(value, notify):
        return [value.name, value.msg]
    return {"$": "object", "type": type(value).__name__}


# Commands. Each takes the state and keyword arguments.


def open_engine(state, engine="main", host="127.0.0.1", metadata="P2PHANDSHAKE", protocol="tcp", device=""):
    made = state.module.TransferEngine()
    code = made.initialize(host, metadata, protocol, device)
    error = last_error(state)
    if code == 0:
        state.engines[engine] = made
    port = made.get_rpc_port() if code == 0 else 0
    return {"code": code, "port": port, "name": f"{host.split(':')[0]}:{port}", "error": error}


def make_engine(state, engine):
    """An engine that is not initialized."""
    state.engines[engine] = state.module.TransferEngine()


def drop_engine(state, engine="main"):
    import gc

    del state.engines[engine]
    gc.collect()


def last_error(state):
    ask = getattr(state.module.TransferEngine, "last_error", None)
    return ask() if ask is not None else None


def te(state, method, args, kwargs, engine="main"):
    """One call of an engine method: what it returned or raised, what it says about it, how long it took."""
    target = state.engines[engine]
    args = decode(args, state)
    kwargs = {k: decode(v, state) for k, v in kwargs.items()}
    start = time.monotonic()
    try:
        value, raised = getattr(target, method)(*args, **kwargs), None
    except Exception as failure:
        value, raised = None, [type(failure).__name__, str(failure)]
    seconds = time.monotonic() - start
    return {"value": encode(value, state), "raised": raised, "error": last_error(state), "seconds": seconds}


def te_fresh(state, **call):
    """`te` in a thread of its own: what it says about the call cannot be left over from an earlier one."""
    answer = []
    thread = threading.Thread(target=lambda: answer.append(te(state, **call)))
    thread.start()
    thread.join()
    return answer[0]


def alloc(state, name, size, huge=False):
    import numpy as np

    area = mmap.mmap(-1, max(size, 1))
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    state.maps.append(area)
    state.buffers[name] = np.frombuffer(area, dtype=np.uint8)
    return state.address(name)


def free(state, name):
    view = state.buffers.pop(name)
    address = view.ctypes.data
    del view
    for area in state.maps:
        probe = (ctypes.c_char * 1).from_buffer(area)
        same = ctypes.addressof(probe) == address
        del probe
        if same:
            state.maps.remove(area)
            area.close()
            return


def fill(state, name, seed, start=0, length=None):
    import pattern

    pattern.fill(state.view(name, start, length), seed)


def check(state, name, background, start=0, length=None, patches=(), plan=None):
    """Compares the memory with `background`, except for what `patches` or the blocks of `plan` have brought from a source.

    Returns the first differences as text; an empty list means equal.
    """
    import numpy as np
    import pattern

    seen = state.view(name, start, length)
    if not patches and plan is None:
        at = pattern.difference(seen, background)
        return [] if at is None else [f"byte {at} of {name} is {int(seen[at])}"]
    wanted = pattern.pattern(background, 0, len(seen))
    for to, seed, at, n in patches:
        wanted[to : to + n] = pattern.pattern(seed, at, n)
    if plan is not None:
        local, remote, lengths = pattern.plan(plan["seed"], plan["count"], plan["longest"])
        to, source = (local, remote) if plan["into"] == "local" else (remote, local)
        image = pattern.pattern(plan["source"], 0, len(seen))
        for t, s, n in zip(to, source, lengths):
            wanted[t : t + n] = image[s : s + n]
    wrong = np.flatnonzero(wanted != seen)
    return [
        f"{len(wrong)} bytes of {name} differ; byte {i} is {int(seen[i])}, not {int(wanted[i])}" for i in wrong[:4].tolist()
    ]


def peek(state, name, start, length):
    return state.view(name, start, length).tobytes()


def poke(state, name, start, data):
    state.view(name, start, len(data) // 2)[:] = list(bytes.fromhex(data))


def transfer_plan(state, op, target, buffer, remote, seed, count, longest, way="sync", engine="main", extra=()):
    """A batch of the blocks of a plan. `extra` are further (local address, remote address, length) entries."""
    import pattern

    locals_, remotes, lengths = pattern.plan(seed, count, longest)
    base = state.address(buffer)
    locals_ = [base + o for o in locals_] + [e[0] for e in extra]
    remotes = [remote + o for o in remotes] + [e[1] for e in extra]
    lengths = lengths + [e[2] for e in extra]
    call = getattr(state.engines[engine], f"batch_transfer_{way}_{op}")
    return {"value": call(target, locals_, remotes, lengths), "error": last_error(state)}


def poll(state, id, seconds=10, engine="main"):
    """Polls an id until it has a final state; returns it and how often it was asked."""
    end, asked, pause = time.monotonic() + seconds, 0, threading.Event()
    while time.monotonic() < end:
        asked += 1
        status = state.engines[engine].transfer_check_status(id)
        if status != 0:
            return {"status": status, "asked": asked}
        pause.wait(0.0005)
    return {"status": 0, "asked": asked}


def start(state, thread, do, args):
    """Runs a command in a thread of this process."""
    slot = {"done": threading.Event()}

    def body():
        try:
            slot["value"] = COMMANDS(do)(state, **args)
        except BaseException as failure:
            slot["failure"] = f"{type(failure).__name__}: {failure}"
        slot["done"].set()

    state.threads[thread] = slot
    threading.Thread(target=body, daemon=True).start()


def join(state, thread, seconds):
    slot = state.threads[thread]
    if not slot["done"].wait(seconds):
        return {"done": False}
    if "failure" in slot:
        raise RuntimeError(slot["failure"])
    return {"done": True, "value": encode(slot["value"], state)}


def usage(state):
    """CPU seconds, resident KiB now and at most, threads, descriptors."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    kib = lambda key: int(status[key].split()[0])  # noqa: E731
    return {
        "cpu": used.ru_utime + used.ru_stime,
        "rss": kib("VmRSS"),
        "peak": kib("VmHWM"),
        "threads": int(status["Threads"]),
        "fds": len(os.listdir("/proc/self/fd")),
        "SigCgt": status["SigCgt"].strip(),
        "SigIgn": status["SigIgn"].strip(),
        "SigBlk": status["SigBlk"].strip(),
    }


def reset_peak(state):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def set_env(state, name, value):
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def logs(state, clear=False):
    kept = list(state.logs)
    if clear:
        state.logs.clear()
    return kept


def COMMANDS(name):  # noqa: N802
    module, colon, function = name.rpartition(":")
    if colon:
        return getattr(importlib.import_module(module), function)
    own = globals().get(name)
    if callable(own) and getattr(own, "__module__", None) == __name__:
        return own
    import gpu_jobs
    import jobs

    return getattr(jobs, name, None) or getattr(gpu_jobs, name)


def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test run that is killed leaves nobody behind
    before = time.monotonic()
    module = importlib.import_module(sys.argv[1])
    state = State(module)
    logging.getLogger().addHandler(Collect(state.logs))
    logging.getLogger().setLevel(logging.DEBUG)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    hello = {"file": module.__file__, "pid": os.getpid(), "import_seconds": time.monotonic() - before}
    print(json.dumps({"id": 0, "value": hello}), file=REPLIES)
    for line in sys.stdin:
        command = json.loads(line)
        reply = {"id": command["id"]}
        try:
            reply["value"] = encode(COMMANDS(command["do"])(state, **command["args"]), state)
        except Exception as failure:
            reply["failure"] = [type(failure).__name__, str(failure)]
        print(json.dumps(reply), file=REPLIES)
    if "--exit-normally" not in sys.argv:
        os._exit(0)


if __name__ == "__main__":
    main()
