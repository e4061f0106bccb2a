"""What travels to a machine without Rust: the wheel, the program and these scripts, in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LIMIT = 64 << 20


def pack(folder: Path, scripts: Path) -> int:
    root = scripts.parent
    maturin = root / ".venv/bin/maturin"
    if not maturin.exists():
        print("gpu-check: there is no .venv yet: run scripts/test install", file=sys.stderr)
        return 2
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("tensorferry-*.whl"):
        old.unlink()
    run([maturin, "build", "--release", "--locked", "--strip", "--interpreter", root / ".venv/bin/python", "--out", folder], root)
    run(["cargo", "build", "--release", "--locked", "-p", "tensorferry-cli"], root)
    shutil.copy2(target / "release/tensorferry", folder)
    shutil.copy2(scripts / "gpu-check", folder)
    modules = folder / "gpu_check"
    shutil.copytree(scripts / "gpu_check", modules, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / (1 << 20):.1f} MiB; there: python3 gpu-check --json report.json")
    if size > LIMIT:
        print(f"gpu-check: that is more than the {LIMIT >> 20} MiB that can travel", file=sys.stderr)
        return 1
    return 0


def run(command: list, folder: Path) -> None:
    subprocess.run(
        [str(part) for part in command], cwd=folder, check=True, env={**os.environ, "PYO3_PYTHON": str(folder / ".venv/bin/python")}
    )
