"""Runs a program that imports `mooncake.engine`, with this engine in its place.

The program, and every Python process that it starts, finds a package `mooncake` whose `engine` is ours and whose rest
is what is installed.
"""

from __future__ import annotations

import io
import os
import runpy
import shutil
import sys
import types

from tensorferry.mooncake import _stand_in

USAGE = """\
usage: python -m tensorferry.mooncake SCRIPT [ARG...]
       python -m tensorferry.mooncake -m MODULE [ARG...]
       python -m tensorferry.mooncake -c CODE [ARG...]

Runs a program that imports mooncake.engine, with tensorferry in its place. Python processes that it starts
find it there, too, through PYTHONPATH: those with -E or -I, or with a PYTHONPATH of their own, do not.

Options of Python's own go before -m tensorferry.mooncake. A program on PATH is named as $(which PROGRAM).
To check which engine a process has: mooncake.engine.__file__ lies in the package tensorferry.
"""


def main(argv: list[str]) -> int:
    """Runs the program that `argv` names. Returns 2 if it names none; else what the program leaves is up to it."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not argv:
        return _refuse("no script is named")
    if argv[0] in ("-m", "-c"):
        if len(argv) < 2:
            return _refuse(f"{argv[0]} needs an argument")
        what, program, rest = argv[0], argv[1], argv[2:]
    elif argv[0].startswith("-"):
        return _refuse(f"there is no option {argv[0]}")
    else:
        what, program, rest = "", argv[0], argv[1:]
        if not os.path.exists(program):
            return _refuse(_no_file(program))
    _install()
    if what == "-m":
        sys.argv = [program, *rest]  # runpy puts the module's file in the first place
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = ["-c", *rest]
        _execute(program, "<string>", None)
    elif os.path.isdir(program) or program.endswith((".zip", ".pyz")):
        sys.argv = [program, *rest]
        sys.path[:] = [entry for entry in sys.path if entry != _own_entry()]
        runpy.run_path(program, run_name="__main__")
    else:
        sys.argv = [program, *rest]
        _replace_own_entry(os.path.dirname(os.path.realpath(program)))
        with io.open_code(os.path.abspath(program)) as file:
            source = file.read()
        _execute(source, program, program)
    return 0


def _refuse(why: str) -> int:
    print(f"{why}\n{USAGE}", end="", file=sys.stderr)
    return 2


def _no_file(program: str) -> str:
    if os.path.dirname(program):
        return f"there is no file {program!r}"
    if shutil.which(program):
        return f"there is no file {program!r} here; for the program on PATH, write $(which {program})"
    return f"there is no file {program!r} here, and no program of that name on PATH"


def _install() -> None:
    """Puts the stand-in first on the path of this process and of those it starts."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [entry for entry in inherited if entry and entry != _stand_in.FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join([_stand_in.FOLDER, *rest])
    _stand_in.on_path()
    for name in [name for name in sys.modules if name == "mooncake" or name.startswith("mooncake.")]:
        del sys.modules[name]


def _own_entry() -> str | None:
    """What Python put in front of the path because of `-m`: the working directory."""
    return None if sys.flags.safe_path else os.getcwd()


def _replace_own_entry(folder: str) -> None:
    """Has the script's folder stand where Python put the working directory, as if the script had been named alone."""
    own = _own_entry()
    if own is None:
        return
    at = sys.path.index(own) if own in sys.path else len(sys.path[:1])
    sys.path[at : at + (own in sys.path)] = [folder]


def _execute(source: str | bytes, name: str, file: str | None) -> None:
    """Runs code as the module `__main__`, which it stays after its end, for threads and exit handlers."""
    code = compile(source, name, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    if file is not None:
        module.__file__ = file
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
