"""The other side of gate S9: a fresh process that knows nothing but a JSON description and some file descriptors. Standard
library only.

Run as a file with ``python -I -S``. It reads one JSON object on stdin, maps each arena once, builds every view from its
metadata, and answers on stdout with what it built: the arena each view lies in, where, its shape and strides, and which views
share bytes by their real addresses. For a pair that shares bytes it also writes through one view and reads through the other,
and puts the bytes back.
"""

import json
import mmap
import os
import sys
from typing import Any

#: what the worker writes through one view of a pair; the other must show it
PATTERN = b"palimpsest-alias"
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


def main() -> int:
    asked: dict[str, Any] = json.loads(sys.stdin.read())
    arenas, bases = {}, {}
    for name, arena in asked["arenas"].items():
        status = os.fstat(arena["fd"])
        memory = memoryview(mmap.mmap(arena["fd"], status.st_size))
        arenas[name] = memory
        bases[name] = {"inode": status.st_ino, "size": status.st_size}
    built: dict[str, Any] = {}
    views: dict[str, memoryview] = {}
    for name, view in asked["views"].items():
        memory = arenas[view["arena"]]
        views[name] = memory[view["offset"] : view["offset"] + view["bytes"]]
        planes = []
        for plane in view["planes"]:
            at, count = view["offset"] + plane["offset"], plane["itemsize"]
            for size in plane["shape"]:
                count *= size
            flat = memory[at : at + count]
            code: Any = _CODES[plane["itemsize"]]
            shaped: Any = flat.cast(code, plane["shape"]) if count else flat
            planes.append({
                "name": plane["name"], "dtype": plane["dtype"], "offset": plane["offset"],
                "shape": list(shaped.shape) if count else plane["shape"],
                "strides": list(shaped.strides) if count else plane["strides"], "itemsize": plane["itemsize"],
            })  # fmt: skip
        built[name] = {
            "arena": view["arena"],
            "inode": bases[view["arena"]]["inode"],
            "offset": view["offset"],
            "bytes": len(views[name]),
            "planes": planes,
        }
    pairs = [
        [first, second, _shared(views[first], views[second], first_offset, second_offset)]
        for first, first_offset, second, second_offset in asked["pairs"]
    ]
    json.dump({"views": built, "pairs": pairs}, sys.stdout)
    return 0


def _shared(first: memoryview, second: memoryview, first_at: int, second_at: int) -> bool:
    """Whether bytes written through ``first`` at ``first_at`` appear in ``second`` at ``second_at``."""
    size = min(len(PATTERN), len(first) - first_at, len(second) - second_at)
    kept = bytes(first[first_at : first_at + size])
    turned = bytes(a ^ b ^ 0xA5 for a, b in zip(kept, PATTERN, strict=False))
    first[first_at : first_at + size] = turned
    seen = bytes(second[second_at : second_at + size]) == turned
    first[first_at : first_at + size] = kept
    return seen


if __name__ == "__main__":
    sys.exit(main())
