"""Puts the engines that are only compared into folders of their own, from PyPI, without what they do not need here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from comparing.contenders import ELSEWHERE, PEER, PEER_VERSION

#: Each with what its import really needs. NIXL asks for PyTorch, which brings gigabytes for GPUs and is not used here.
PACKAGES = {
    "nixl": ["nixl-cu12==1.5.1", "numpy==2.4.6"],
    "gloo": ["xoscar==0.12.2", "numpy==2.4.6"],
}


def install() -> int:
    """Returns how many could not be installed."""
    missing = 0
    if not PEER.is_dir():
        print(f"{PEER_VERSION} of Mooncake is not there: scripts/test install brings it", file=sys.stderr)
        missing += 1
    for name, packages in PACKAGES.items():
        missing += not install_one(ELSEWHERE / name, packages)
    return missing


def install_one(folder: Path, packages: list[str]) -> bool:
    stamp = folder / "packages"
    if stamp.exists() and stamp.read_text().split() == packages:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{' '.join(packages)} into {folder}", flush=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *packages]):
        if subprocess.run(command, check=False).returncode != 0:
            print(f"{' '.join(packages)} cannot be installed", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            return False
    stamp.write_text("\n".join(packages) + "\n")
    return True
