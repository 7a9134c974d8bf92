"""What an exported step is: programs, the views they are called with, and the order of calls. Plain values with a JSON form.

An argument is an affine view: it begins ``offset`` bytes into its buffer, plus ``steps[axis] * value`` for every loop axis of its
pass. So one small program serves every tile of a buffer, and its size does not depend on the prepared capacity.
"""

from dataclasses import dataclass, field
from typing import Any

from palimpsest.core.units import dtype_bytes

#: prefix of the small tensors that the runner itself fills: positions, row counts
CONTROL = "control."


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a call.

    buffer:  planned buffer, weight, or ``control.<name>``
    size, stride: elements; ``dynamic`` axes may be shorter at run time, up to this size
    offset:  bytes from the buffer's start when every axis is 0
    steps:   axis -> bytes added per unit of its value
    mutated: the program writes it; then it shares no byte with another argument of the call
    """

    buffer: str
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    mutated: bool = False
    dynamic: dict[int, str] = field(default_factory=dict)

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (last + 1) * dtype_bytes(self.dtype) if all(self.size) else 0

    def signature(self) -> dict[str, Any]:
        """What the program itself knows of the argument."""
        size: list[int | str] = [self.dynamic.get(axis, extent) for axis, extent in enumerate(self.size)]
        return {"dtype": self.dtype, "size": size, "stride": list(self.stride), "mutated": self.mutated}

    def to_json(self) -> dict[str, Any]:
        return {
            "buffer": self.buffer,
            "dtype": self.dtype,
            "size": list(self.size),
            "stride": list(self.stride),
            "offset": self.offset,
            "steps": dict(sorted(self.steps.items())),
            "mutated": self.mutated,
            "dynamic": {str(axis): name for axis, name in sorted(self.dynamic.items())},
        }


@dataclass(frozen=True)
class Pass:
    """Calls of one program over the values of ``loops``, the outermost first."""

    program: str
    loops: tuple[str, ...]
    args: tuple[Argument, ...]

    def to_json(self) -> dict[str, Any]:
        return {"program": self.program, "loops": list(self.loops), "args": [argument.to_json() for argument in self.args]}


@dataclass(frozen=True)
class Stage:
    """One step of the core, in the runner's words.

    runner:  which loop of the loader drives it (docs/format.md lists them)
    passes:  programs in order; none for a step of communication only
    numbers: whole numbers the runner needs (tile, topk, page, ...)
    control: name -> length of an i64 tensor that the runner fills
    roles:   role -> buffer, for what the runner itself reads and writes
    planes:  copies from a tile to a cache page: pairs of sizes, see docs/format.md
    """

    name: str
    phase: str
    runner: str
    passes: tuple[Pass, ...] = ()
    numbers: dict[str, int] = field(default_factory=dict)
    control: dict[str, int] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    planes: tuple[dict[str, int], ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "phase": self.phase,
            "runner": self.runner,
            "passes": [one.to_json() for one in self.passes],
            "numbers": dict(sorted(self.numbers.items())),
            "control": dict(sorted(self.control.items())),
            "roles": dict(sorted(self.roles.items())),
            "planes": [dict(sorted(p.items())) for p in self.planes],
            "reads": sorted(self.reads),
            "writes": sorted(self.writes),
        }
