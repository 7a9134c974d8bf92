"""Guards over a running session: no hidden tensor allocation, canaries in unowned bytes, no write outside a step's declaration.

They observe and never change a result: a sealed run gives the same bytes with and without them.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from palimpsest.core.errors import HiddenAllocation
from palimpsest.core.spec import Step
from palimpsest.core.units import format_bytes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.ranks.layout import local_page, page_owner
from palimpsest.run.arena import Arena

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
#: bytes handled at once: fits a core's cache
_BLOCK = 1 << 17


class SealGuard(TorchDispatchMode):
    """``with SealGuard(arena):`` raises HiddenAllocation when a torch operation returns memory of its own.

    A returned tensor must live in a mapped segment or in the storage of one of the operation's own inputs; factories, clones and
    out-of-place arithmetic do not. Temporaries inside one operation never leave it: ``meters.meter(torch_memory=True)`` sees
    those. Guards the current thread only.
    """

    def __init__(self, arena: Arena):
        super().__init__()
        self.ranges = arena.ranges()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations += 1
        owned: set[int] | None = None
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if not size or any(first <= start < end for first, end in self.ranges):
                continue
            if owned is None:
                owned = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            if start not in owned:
                raise HiddenAllocation(
                    f"{func} returned {list(tensor.shape)} {tensor.dtype}, {format_bytes(size)} outside the plan after the seal; "
                    "write into a planned buffer or the step's scratch"
                )
        return out


class Canary:
    """The address-derived pattern: the word at offset 8*i is ``splitmix64(seed, 8*i)``, so a misplaced copy of it is still wrong.

    Fills and checks u8 tensors in place, block by block, with memory of its own taken in the constructor.
    """

    def __init__(self, seed: int):
        self.seed = np.uint64(seed & (2**64 - 1))
        words = _BLOCK // 8
        self._steps = np.arange(1, words + 2, dtype=np.uint64) * _GOLDEN
        self._words = np.empty(words + 1, np.uint64)
        self._temporary = np.empty(words + 1, np.uint64)

    def expected(self, offset: int, nbytes: int) -> np.ndarray:
        """The pattern of bytes [offset, offset + nbytes), at most a block; valid until the next call."""
        skip = offset % 8
        count = -(-(skip + nbytes) // 8)
        words, temporary = self._words[:count], self._temporary[:count]
        base = (int(self.seed) + (offset // 8) * int(_GOLDEN)) & (2**64 - 1)
        np.add(self._steps[:count], np.uint64(base), out=words)
        for shift, factor in _MIX:
            np.right_shift(words, np.uint64(shift), out=temporary)
            np.bitwise_xor(words, temporary, out=words)
            np.multiply(words, factor, out=words)
        np.right_shift(words, np.uint64(31), out=temporary)
        np.bitwise_xor(words, temporary, out=words)
        return words.view(np.uint8)[skip : skip + nbytes]

    def fill(self, memory: torch.Tensor, start: int, stop: int) -> int:
        """Write the pattern over ``memory[start:stop]``; returns the bytes written."""
        array = memory.numpy()
        for at in range(start, stop, _BLOCK):
            end = min(at + _BLOCK, stop)
            array[at:end] = self.expected(at, end - at)
        return stop - start

    def first_bad(self, memory: torch.Tensor, start: int, stop: int) -> int | None:
        """Offset of the first byte of ``memory[start:stop]`` that is not the pattern, or None."""
        array = memory.numpy()
        for at in range(start, stop, _BLOCK):
            end = min(at + _BLOCK, stop)
            wanted = self.expected(at, end - at)
            if not np.array_equal(array[at:end], wanted):
                return at + int(np.flatnonzero(array[at:end] != wanted)[0])
        return None


class SlackCanaries:
    """Canaries in every byte of an arena that no buffer owns: holes and the tail of each segment's last page."""

    def __init__(self, arena: Arena, seed: int):
        self.arena, self.canary = arena, Canary(seed)
        self.nbytes = sum(self.canary.fill(arena.segment(kind), *span) for kind in arena.segments for span in arena.slack(kind))

    def damage(self) -> list[str]:
        """One line per damaged range: segment, offset of the first bad byte, value found."""
        found = []
        for kind in self.arena.segments:
            memory = self.arena.segment(kind)
            for start, stop in self.arena.slack(kind):
                at = self.canary.first_bad(memory, start, stop)
                if at is not None:
                    found.append(f"{kind} segment: byte {at} of the unowned range [{start}, {stop}) is {int(memory[at])}")
        return found


@dataclass(frozen=True)
class Violation:
    """A byte that a step changed without declaring it. ``owners``: buffers over it; ``declared``: how the step accesses them."""

    step: str
    segment: str
    offset: int
    owners: tuple[str, ...]
    declared: tuple[str, ...]

    def __str__(self) -> str:
        owners = ", ".join(f"{o} ({d})" for o, d in zip(self.owners, self.declared, strict=True)) or "no buffer"
        return f"step {self.step} changed byte {self.offset} of the {self.segment} segment: {owners}"


Allowed = Callable[[Step, Call, Chunk], Iterable[tuple[str, int, int]]]


def declared_writes(arena: Arena, step: Step, rank: int, chunk: Chunk) -> list[tuple[str, int, int]]:
    """(segment, start, stop) that the step may change in this chunk.

    Written and updated buffers and scratch; a plane over ``tokens`` only up to the visible tokens, one over ``pages`` only the
    pages that hold tokens of this chunk and belong to this rank.
    """
    found = []
    for access, name in step.accesses():
        if access == "read":
            continue
        place = arena.plan.by_name[name]
        buffer = arena.program.by_name[name]
        at = place.offset
        for plane in buffer.planes:
            axis, each = plane.axes[0], plane.nbytes // max(1, plane.shape[0])
            if axis == "tokens":
                found.append((place.kind, at, at + chunk.visible * each))
            elif axis == "pages":
                pages = _own_pages(arena, rank, chunk)
                found += [(place.kind, at + p * each, at + (p + 1) * each) for p in pages]
            else:
                found.append((place.kind, at, at + plane.nbytes))
            at += plane.nbytes
    return found


def _own_pages(arena: Arena, rank: int, chunk: Chunk) -> list[int]:
    limits = arena.program.limits
    if not chunk.rows:
        return []
    first, last = chunk.history // limits.page, (chunk.visible - 1) // limits.page
    return [local_page(p, limits.ranks) for p in range(first, last + 1) if page_owner(p, limits.ranks) == rank]


class WriteWatcher:
    """Hooks for ``Session.prefill``: after every step, all bytes outside its declared writes are what they were before it.

    Covers every segment unless ``kinds`` names some, slack included. ``exact`` keeps a copy of all watched bytes and names the
    first changed one; without it a CRC32 per 64 KiB block is kept and the block's start is named. ``allowed`` replaces
    ``declared_writes``.
    ``violations`` collects what was found, ``checked`` counts the bytes compared.
    """

    def __init__(self, arena: Arena, *, exact: bool = True, kinds: Iterable[str] | None = None, allowed: Allowed | None = None):
        self.arena, self.exact = arena, exact
        self.kinds = tuple(kinds) if kinds is not None else tuple(arena.segments)
        self.allowed = allowed or (lambda step, call, chunk: declared_writes(arena, step, call.comm.rank, chunk))
        self.violations: list[Violation] = []
        self.checked = 0
        self._copies = {k: np.empty(arena.segments[k].mapped, np.uint8) for k in self.kinds} if exact else {}
        self._before: dict[tuple[str, int, int], int] = {}
        self._complement: list[tuple[str, int, int]] = []

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        self._complement = self._outside(self.allowed(step, call, chunk))
        for kind, start, stop in self._complement:
            memory = self.arena.segment(kind).numpy()
            if self.exact:
                self._copies[kind][start:stop] = memory[start:stop]
            else:
                for at, end in _blocks(start, stop):
                    self._before[kind, at, end] = _crc(memory[at:end])

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        for kind, start, stop in self._complement:
            memory = self.arena.segment(kind).numpy()
            self.checked += stop - start
            bad = self._first_changed(kind, memory, start, stop)
            if bad is not None:
                self.violations.append(self._violation(step, kind, bad))
        self._before.clear()

    def tap(self, step: Step, event: str, **data: Any) -> None:
        """Nothing to see: events carry read-only data."""

    def _first_changed(self, kind: str, memory: np.ndarray, start: int, stop: int) -> int | None:
        if not self.exact:
            return next((at for at, end in _blocks(start, stop) if _crc(memory[at:end]) != self._before[kind, at, end]), None)
        copy = self._copies[kind]
        if np.array_equal(memory[start:stop], copy[start:stop]):
            return None
        return start + int(np.flatnonzero(memory[start:stop] != copy[start:stop])[0])

    def _outside(self, inside: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        spans: dict[str, list[tuple[int, int]]] = {kind: [] for kind in self.kinds}
        for kind, start, stop in inside:
            if kind in spans:
                spans[kind].append((start, stop))
        found = []
        for kind, taken in spans.items():
            at = 0
            for start, stop in [*sorted(taken), (self.arena.segments[kind].mapped,) * 2]:
                if start > at:
                    found.append((kind, at, start))
                at = max(at, stop)
        return found

    def _violation(self, step: Step, kind: str, offset: int) -> Violation:
        access = {name: how for how, name in step.accesses()}
        owners = [p.buffer for p in self.arena.plan.places if p.kind == kind and p.offset <= offset < p.stop]
        declared = tuple(access.get(name, "undeclared") for name in owners)
        return Violation(step.name, kind, offset, tuple(owners), declared)


def _crc(block: np.ndarray) -> int:
    return zlib.crc32(block.data)


def _blocks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    for at in range(start, stop, 1 << 16):
        yield at, min(at + (1 << 16), stop)
