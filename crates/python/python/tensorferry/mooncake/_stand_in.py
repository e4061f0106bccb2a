"""How a package `mooncake` whose `engine` is ours comes into a process."""

from __future__ import annotations

import os
import sys
from _thread import RLock
from types import ModuleType

#: The folder that holds our package `mooncake`. Whatever else has that name joins it.
FOLDER = os.path.join(os.path.dirname(os.path.realpath(__file__)), "_shim")
_OWN = os.path.join(FOLDER, "mooncake")
_ENGINE = "mooncake.engine"
_ENGINE_FILE = os.path.join(_OWN, "engine.py")

#: The `mooncake.engine` that was imported before ours took its place.
_replaced: ModuleType | None = None
#: Held while the installed engine is loaded, so that two threads do not load it twice.
_loading = RLock()


def on_path() -> None:
    """Puts our package first on the path."""
    sys.path[:] = [FOLDER, *(entry for entry in sys.path if entry != FOLDER)]


def install() -> None:
    """Has `mooncake.engine` be this engine from now on, in this process and those that `multiprocessing` starts.

    An installed Mooncake keeps its other modules. Where there is none, there is a package `mooncake` now. Call it
    before anything imports `mooncake.engine`: names that were imported from there stay what they were, which is a
    RuntimeWarning. Calling it again does nothing.
    """
    import importlib.util

    on_path()
    before = sys.modules.get(_ENGINE)
    if before is not None and getattr(before, "__file__", None) == _ENGINE_FILE:
        return
    if before is not None and before.__name__ == _ENGINE:
        _keep(before)
    spec = importlib.util.spec_from_file_location(_ENGINE, _ENGINE_FILE)
    assert spec is not None and spec.loader is not None
    # In this order, so that an installed package that imports its engine finds ours.
    engine = sys.modules[_ENGINE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    importlib.import_module("mooncake").__dict__["engine"] = engine


def _keep(engine: ModuleType) -> None:
    import warnings

    global _replaced
    _replaced = engine
    warnings.warn(
        "mooncake.engine was imported before tensorferry.mooncake.install() was called: what was imported from it "
        "does not run on tensorferry",
        RuntimeWarning,
        stacklevel=3,
    )


def installed(name: str) -> object:
    """What the `mooncake.engine` that is installed beside ours has under `name`.

    Its extension is loaded for that, under another name, the first time that it is asked for.

    Raises:
        AttributeError: No other `mooncake.engine` is installed, it cannot be loaded, or it has no such name.
    """
    missing = f"tensorferry's mooncake.engine has no {name!r}"
    try:
        engine = _replaced or _load()
    except ImportError as failure:
        raise AttributeError(f"{missing}, and the one that is installed cannot be loaded: {failure}") from failure
    if engine is None:
        raise AttributeError(f"{missing}, and no other mooncake.engine is installed that might")
    try:
        return getattr(engine, name)
    except AttributeError:
        raise AttributeError(f"{missing}, and neither has the one that is installed ({engine.__file__})") from None


def _load() -> ModuleType | None:
    import importlib.util
    from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder

    # The last part is what its initialization function is called for.
    name = "mooncake._installed.engine"
    with _loading:
        loaded = sys.modules.get(name)
        if loaded is not None:
            return loaded
        for folder in getattr(sys.modules.get("mooncake"), "__path__", ()):
            spec = None
            if folder != _OWN:
                spec = FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec(name)
            if spec is None or spec.loader is None:
                continue
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
            return module
    return None
