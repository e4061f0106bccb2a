"""Stands in for the package `mooncake`: its `engine` is ours, the rest is what is installed."""

import pkgutil as _pkgutil
import warnings as _warnings
from pathlib import Path as _Path

__path__ = _pkgutil.extend_path(__path__, __name__)


def _run_installed() -> None:
    """Runs the `__init__.py` of the installed package here, as if this were it."""
    own = _Path(__file__).resolve()
    for folder in __path__:
        file = _Path(folder, "__init__.py")
        if not file.is_file() or file.resolve() == own:
            continue
        globals()["__file__"] = str(file)
        if __spec__ is not None:
            __spec__.origin = str(file)
        try:
            exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), globals())
        except Exception as error:
            _warnings.warn(
                f"{file} failed ({type(error).__name__}: {error}); mooncake.engine is tensorferry's and works, "
                "the rest of the package may not",
                RuntimeWarning,
                stacklevel=2,
            )
        return


_run_installed()
