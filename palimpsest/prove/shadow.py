"""Gate S8: every byte a step reads was written in this epoch by the step that declares to write it.

A shadow holds, for every 4 bytes of the reusable segment, the step that wrote them and the epoch. Who wrote is seen, not
believed: before a step overwrites a buffer its whole extent is filled with words that no result can contain (NaN of a tag, ids
far out of range), and what is still such a word afterwards was not written. Words of an earlier epoch or of the other owner of
shared bytes keep their old mark and fail the reader. Runs in replays of its own, because it fills bytes that a case poisons
otherwise.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palimpsest.core.spec import Plane, Program, Step
from palimpsest.kernels.call import Call, Chunk
from palimpsest.prove.spill import Spill
from palimpsest.run.arena import Arena

#: bytes under one mark
WORD = 4
#: dtype -> a word of which no finite result, visible id or count can be made
_UNWRITTEN = {
    "e4m3": 0x7F7F7F7F, "u8": 0x7F7F7F7F, "fp32": 0x7FC0DEAD, "bf16": 0x7FDE7FDE, "fp16": 0x7EDE7EDE,
    "i32": 0x7F0000A5, "i64": 0x7F0000A5,
    "fp64": 0x7FF8C0DE,
}  # fmt: skip
#: latent format -> dtype whose word fills a record
_RECORD = {"bf16": "bf16", "fp32": "fp32"}
#: epochs told apart by a mark
_EPOCHS = 16


@dataclass
class Shadow:
    """Hooks of one replay. ``reads`` counts (step, buffer) pairs looked at, ``nbytes`` their bytes, ``faults`` what was wrong.

    marks: of the reusable segment, one a word: 1 + 16 * step + epoch mod 16; 0 is poison
    """

    arena: Arena
    rank: int
    epoch: int
    marks: NDArray[np.uint16]
    reads: int = 0
    nbytes: int = 0
    faults: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, arena: Arena, rank: int, spill: Spill) -> "Shadow":
        marks = spill.empty((arena.segments["reusable"].mapped // WORD,), np.uint16)
        marks.fill(0)
        return cls(arena, rank, 0, marks)

    def begin(self, epoch: int) -> None:
        """A new replay: marks of earlier ones stay and are stale."""
        self.epoch, self.reads, self.nbytes, self.faults = epoch, 0, 0, []

    def _mark(self, step: int) -> int:
        return 1 + _EPOCHS * step + self.epoch % _EPOCHS

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        program, number = self.arena.program, _number(self.arena.program, step)
        for access, name in step.accesses():
            if self._watched(name, step) and access in ("read", "update"):
                self._read(step, name, chunk, number)
        for access, name in step.accesses():
            if self._watched(name, step) and access == "write" and not self._caller_fills(program, name):
                self._forget(name)

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        number = _number(self.arena.program, step)
        for access, name in step.accesses():
            if self._watched(name, step) and access in ("write", "update"):
                self._written(name, number)

    def tap(self, step: Step, event: str, **data: Any) -> None:
        """Events move no byte."""

    def _watched(self, name: str, step: Step) -> bool:
        return self.arena.plan.by_name[name].kind == "reusable" and name != step.scratch_name

    def _caller_fills(self, program: Program, name: str) -> bool:
        return name in program.inputs

    def _words(self) -> NDArray[np.uint32]:
        return self.arena.segment("reusable").numpy().view(np.uint32)

    def _planes(self, name: str) -> list[tuple[int, int, int, Plane]]:
        """(first word, words, unwritten word, plane) of each plane; a scratch that ends inside a word is none of them."""
        found, at = [], self.arena.plan.by_name[name].offset
        for plane in self.arena.program.by_name[name].planes:
            assert at % WORD == plane.nbytes % WORD == 0, (name, at, plane.nbytes)
            found.append((at // WORD, plane.nbytes // WORD, _UNWRITTEN[self._dtype(name, plane)], plane))
            at += plane.nbytes
        return found

    def _dtype(self, name: str, plane: Plane) -> str:
        latent = str(dict(self.arena.program.facts).get("latent_format", "fp8"))
        return _RECORD.get(latent, plane.dtype) if name == self.arena.program.histories[-1] else plane.dtype

    def _forget(self, name: str) -> None:
        for first, count, word, _ in self._planes(name):
            self._words()[first : first + count] = word
            self.marks[first : first + count] = 0

    def _written(self, name: str, number: int) -> None:
        for first, count, word, _ in self._planes(name):
            span = slice(first, first + count)
            self.marks[span][self._words()[span] != word] = self._mark(number)

    def _read(self, step: Step, name: str, chunk: Chunk, number: int) -> None:
        """Every word of the active region of ``name`` bears the mark of its last writer before ``step``, in this epoch."""
        self.reads += 1
        writer = _writer(self.arena.program, name, number)
        for first, _, _, plane in self._planes(name):
            active = plane.nbytes // plane.shape[0] * min(plane.shape[0], self._reach(plane, chunk)) // WORD
            marks = self.marks[first : first + active]
            self.nbytes += active * WORD
            bad = np.flatnonzero(marks != (self._mark(writer) if writer is not None else 0))
            if len(bad):
                at = int(bad[0])
                self.faults.append(
                    f"step {step.name} ({step.phase}) reads bytes {at * WORD}..{at * WORD + 3} of {plane.name} of {name}, "
                    f"{self._shown(int(marks[at]))}"
                )
                return

    def _reach(self, plane: Plane, chunk: Chunk) -> int:
        limits = self.arena.program.limits
        own = max(0, min(limits.slice_rows, chunk.rows - self.rank * limits.slice_rows))
        return {"tokens": chunk.visible, "rows": chunk.rows, "slice": own}.get(plane.axes[0], plane.shape[0])

    def _shown(self, mark: int) -> str:
        if not mark:
            return "which nobody wrote since they were poisoned"
        step, epoch = (mark - 1) // _EPOCHS, (mark - 1) % _EPOCHS
        when = "this epoch" if epoch == self.epoch % _EPOCHS else "an earlier epoch"
        return f"last written in {when} by {self.arena.program.steps[step].name}"


def reads_of(program: Program, reusable: frozenset[str]) -> int:
    """How many (step, buffer) pairs one replay must look at."""
    return sum(access != "write" and name in reusable for step in program.steps for access, name in step.accesses())


def _number(program: Program, step: Step) -> int:
    return next(i for i, other in enumerate(program.steps) if other.name == step.name)


def _writer(program: Program, name: str, before: int) -> int | None:
    """The last step before ``before`` that writes ``name``."""
    found = [i for i, s in enumerate(program.steps[:before]) for access, n in s.accesses() if n == name and access != "read"]
    return found[-1] if found else None
