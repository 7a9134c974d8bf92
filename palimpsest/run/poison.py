"""Poison: fill the reusable segment between replays, so that a byte read before it was written shows.

One pattern hides where another shows: a NaN can be swallowed by a maximum, a high value wins a selection, a low one ties at
zero, stale bytes are what production leaves, an address-derived one betrays misplaced copies. Signals, tables, staging, caches
and weights are never poisoned.
"""

from collections.abc import Iterable

import torch

from palimpsest.core.errors import UnknownName
from palimpsest.core.spec import Buffer, Plane
from palimpsest.core.units import dtype_bytes
from palimpsest.run.arena import Arena
from palimpsest.run.guards import Canary

#: pattern -> meaning
PATTERNS = {
    "Pn": "NaN with a tag; ids far out of range",
    "Ph": "high and plausible: wins every selection; ids valid but wrong",
    "Pl": "low and plausible: zeros; id 0 repeated",
    "Ps": "stale: whatever the previous replay left",
    "Pa": "derived from the byte's address",
}
#: little-endian words by dtype. NaN carries the tag C0DE; high is 2**100, in e4m3 its largest value 448
NAN = {"e4m3": 0x7F, "fp32": 0x7FC0DEAD, "bf16": 0x7FDE, "fp16": 0x7EDE, "fp64": 0x7FF8C0DE7FC0DEAD, "u8": 0x7F}
HIGH = {"e4m3": 0x7E, "fp32": 0x71800000, "bf16": 0x7180, "fp16": 0x7B00, "fp64": 0x4630000000000000, "u8": 0x7E}
#: the high pattern of a scale plane: 2**10
HIGH_SCALE = 0x44800000
#: latent format -> dtype whose word fills a record; fp8_ds_mla records are mixed and take bytes
RECORD = {"fp8": "u8", "fp8_ds_mla": "u8", "bf16": "bf16", "fp32": "fp32"}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(
    arena: Arena,
    pattern: str,
    *,
    seed: int = 0,
    visible: int = 0,
    signs: torch.Tensor | None = None,
    skip: Iterable[str] = (),
) -> int:
    """Fill the reusable segment; returns the bytes written (0 for ``Ps``). Raises UnknownName for an unknown pattern.

    visible: tokens that count as valid for the high pattern's ids
    signs:   e4m3 sign bits as u8 0 or 0x80, [dim]: the high index keys then match one query in sign and win for it
    skip:    buffers left alone, and with them every buffer that shares bytes with one
    Buffers that share bytes are painted from the largest to the smallest, so that the smallest keeps its own pattern whole.
    """
    if pattern not in PATTERNS:
        raise UnknownName("poison", pattern, list(PATTERNS))
    if pattern == "Ps" or "reusable" not in arena.segments:
        return 0
    segment = arena.segments["reusable"]
    kept = [arena.plan.by_name[name] for name in skip]
    if pattern == "Pa" and not kept:
        return Canary(seed).fill(arena.segment("reusable"), 0, segment.logical)
    buffers = [b for b in arena.program.all_buffers if b.kind == "reusable"]
    facts = dict(arena.program.facts)
    written: list[tuple[int, int]] = []
    for buffer in sorted(buffers, key=lambda b: (-b.nbytes, b.name)):
        place = arena.plan.by_name[buffer.name]
        if any(place.offset < k.stop and k.offset < place.stop for k in kept):
            continue
        if pattern == "Pa":
            Canary(seed).fill(arena.segment("reusable"), place.offset, place.stop)
        else:
            _paint(arena, buffer, pattern, str(facts.get("latent_format", "fp8")), visible, signs)
        written.append((place.offset, place.stop))
    return _union(written)


def _paint(arena: Arena, buffer: Buffer, pattern: str, latent: str, visible: int, signs: torch.Tensor | None) -> None:
    if pattern == "Pl":
        arena.raw(buffer.name).zero_()
        return
    for plane in buffer.planes:
        view = arena.view(buffer.name, plane.name)
        if plane.dtype in ("i32", "i64"):
            _ids(view, pattern, visible, plane)
        elif buffer.name.endswith(".scratch"):
            whole = arena.raw(buffer.name)
            _fill(whole[: whole.numel() // 4 * 4], "fp32", pattern)
        elif buffer.name == "latent_history":
            _fill(arena.raw(buffer.name), RECORD[latent], pattern)
        elif plane.name == "scales" and pattern == "Ph":
            view.view(torch.int32).fill_(HIGH_SCALE)
        else:
            _fill(view, plane.dtype, pattern)
            if pattern == "Ph" and signs is not None and plane.name == "keys" and plane.dtype == "e4m3":
                view.view(torch.uint8).bitwise_or_(signs)


def _fill(view: torch.Tensor, dtype: str, pattern: str) -> None:
    word = (NAN if pattern == "Pn" else HIGH)[dtype]
    view.view(-1).view(torch.uint8).view(_WORDS[dtype_bytes(dtype)]).fill_(word)


def _ids(view: torch.Tensor, pattern: str, visible: int, plane: Plane) -> None:
    """NaN: 0x7F0000xx, far out of range and not the pad value. High: ids descending from the last visible one; counts full."""
    flat = view.view(-1)
    if pattern == "Pn":
        tile = torch.arange(256, dtype=flat.dtype) + 0x7F000000
    elif plane.axes[-1] != "topk":
        tile = torch.full((256,), max(1, visible), dtype=flat.dtype)
    else:
        tile = torch.arange(256, dtype=flat.dtype).mul_(-7).add_(visible - 1).remainder_(max(1, visible))
    whole = flat.numel() // 256 * 256
    flat[:whole].view(-1, 256).copy_(tile)
    flat[whole:].copy_(tile[: flat.numel() - whole])


def _union(spans: list[tuple[int, int]]) -> int:
    total, at = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(at, start))
        at = max(at, stop)
    return total
