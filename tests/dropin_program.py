"""A program written for `mooncake.engine`. Says on its last line, as JSON, what it found; `child` makes it one of its own workers."""

import importlib.util
import json
import multiprocessing
import subprocess
import sys


def look() -> dict:
    """Which module this process gets under the name."""
    from mooncake.engine import TransferEngine

    spec = importlib.util.find_spec("mooncake.engine")
    engine = TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return {
        "ours": TransferEngine.__module__.startswith("tensorferry") or hasattr(TransferEngine, "last_error"),
        "spec": spec is not None,
        "code": code,
        "port": engine.get_rpc_port(),
    }


def spawned(queue) -> None:
    queue.put(look())


def main() -> None:
    found = look()
    found["argv"] = sys.argv[1:]
    found["name"] = __name__
    if "--children" in sys.argv:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=spawned, args=(queue,))
        process.start()
        found["spawned"] = queue.get(timeout=30)
        process.join(30)
        out = subprocess.run([sys.executable, __file__, "child"], stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout
        found["subprocess"] = json.loads(out.splitlines()[-1])
    if "--peer" in sys.argv:
        import mooncake

        for name in ("buffer_pool", "mooncake_config", "store"):
            try:
                module = importlib.import_module(f"mooncake.{name}")
                found[name] = module.__file__
            except ImportError as failure:
                found[name] = f"ImportError: {failure}"
        found["exports"] = sorted(getattr(mooncake, "__all__", []))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
