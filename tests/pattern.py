"""Bytes that say where they belong, so that two processes can compare memory without sharing it.

The 64-bit word number `i` of pattern `seed` is `i * STEP + seed * SALT` (mod 2^64). `STEP` is odd, so no word repeats
within a pattern; any part of it can be computed alone, at the speed of memory.
"""

from __future__ import annotations

import numpy as np

STEP = 0x9E3779B97F4A7C15
SALT = 0xC2B2AE3D27D4EB4F
MASK = (1 << 64) - 1
CHUNK_WORDS = 1 << 20
CHUNK = CHUNK_WORDS * 8

_ramp: np.ndarray | None = None


def _ramp_words() -> np.ndarray:
    global _ramp
    if _ramp is None:
        _ramp = np.arange(CHUNK_WORDS, dtype=np.uint64) * np.uint64(STEP)
    return _ramp


def _words(seed: int, first: int, count: int) -> np.ndarray:
    base = np.uint64((first * STEP + seed * SALT) & MASK)
    return _ramp_words()[:count] + base


def pieces(seed: int, start: int, length: int):
    """Yields `(position, bytes)` that together are bytes `start .. start + length` of the pattern."""
    done = 0
    while done < length:
        at = start + done
        first, skip = divmod(at, 8)
        n = min(length - done, CHUNK - skip)
        words = _words(seed, first, (skip + n + 7) // 8)
        yield done, words.view(np.uint8)[skip : skip + n]
        done += n


def pattern(seed: int, start: int, length: int) -> np.ndarray:
    """Bytes `start .. start + length` of pattern `seed`."""
    out = np.empty(length, dtype=np.uint8)
    for at, part in pieces(seed, start, length):
        out[at : at + len(part)] = part
    return out


def fill(view: np.ndarray, seed: int, start: int = 0) -> None:
    """Writes the pattern over `view`."""
    for at, part in pieces(seed, start, len(view)):
        view[at : at + len(part)] = part


def difference(view: np.ndarray, seed: int, start: int = 0) -> int | None:
    """The first position at which `view` is not the pattern."""
    for at, part in pieces(seed, start, len(view)):
        # One look: a peer may be writing there.
        wrong = np.flatnonzero(view[at : at + len(part)] != part)
        if len(wrong):
            return at + int(wrong[0])
    return None


def plan(seed: int, count: int, longest: int) -> tuple[list[int], list[int], list[int]]:
    """`count` blocks of 1 to `longest` bytes: their local offsets, remote offsets and lengths.

    Blocks do not overlap, lie at odd addresses as often as at even ones, and come in an order of their own at either end.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    slot = longest + 17

    def offsets() -> list[int]:
        return (rng.permutation(count) * slot + rng.integers(0, 17, count)).tolist()

    return offsets(), offsets(), lengths.tolist()


def plan_span(count: int, longest: int) -> int:
    """How many bytes of memory a plan needs at either end."""
    return count * (longest + 17)
