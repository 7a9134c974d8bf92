"""Gates S1-S6, A1-A3, X4, X6, V2: where the bytes are, which of them changed, and what was allocated.

The seal gates work on integers of the plan and of the arena; the case gates on what one Observation holds.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from palimpsest.core.spec import Program
from palimpsest.plan.plan import Place, Plan
from palimpsest.prove.capture import Bytes, Observation
from palimpsest.prove.gates import Sheet
from palimpsest.prove.lint import lint_source
from palimpsest.run.arena import PAGE, Arena
from palimpsest.run.meters import Mapped

#: offsets and sizes fit a signed 64-bit integer
_LARGEST = (1 << 63) - 1


def seal_plan(sheet: Sheet, plan: Plan, program: Program, arrangement: str) -> None:
    """S1, S2, S3 of one arrangement."""
    sizes = {segment.kind: segment.nbytes for segment in plan.segments}
    wanted = {b.name: b.nbytes for b in program.all_buffers}
    for p in plan.places:
        good = p.offset >= 0 and p.nbytes == wanted.get(p.buffer) and p.offset + p.nbytes <= sizes.get(p.kind, -1) <= _LARGEST
        sheet.cell("S1").check(
            good, 1, f"{arrangement}: {p.buffer} [{p.offset}, {p.stop}) does not lie in its {p.kind} segment", p.nbytes
        )
        sheet.cell("S2").check(
            p.offset % p.align == 0, 1, f"{arrangement}: {p.buffer} starts at {p.offset}, not a multiple of {p.align}"
        )
        for plane in program.by_name[p.buffer].planes:
            start = p.offset + program.by_name[p.buffer].plane_offset(plane.name)
            if start % max(1, plane.nbytes // max(1, int(np.prod(plane.shape)))):
                sheet.cell("S2").fail(0, f"{arrangement}: plane {plane.name} of {p.buffer} starts at {start}, inside an element")
    _relation(sheet, plan, program, arrangement)


def _relation(sheet: Sheet, plan: Plan, program: Program, arrangement: str) -> None:
    """S3: the pairs that share bytes are those the plan names, no two of them are alive together, the histories are as the
    arrangement says.
    """
    cell = sheet.cell("S3")
    named = {frozenset((o.early, o.late)): (o.start, o.stop) for o in plan.overlaps}
    found: dict[frozenset[str], tuple[int, int]] = {}
    places = list(plan.places)
    for p in places:
        kind = program.by_name[p.buffer].kind
        if p.kind != kind:
            cell.fail(0, f"{arrangement}: {p.buffer} is {kind} in the program and lies in the {p.kind} segment")
    for i, first in enumerate(places):
        for second in places[i + 1 :]:
            if first.kind == second.kind:
                span = max(first.offset, second.offset), min(first.stop, second.stop)
                if span[0] < span[1]:
                    found[frozenset((first.buffer, second.buffer))] = span
                cell.passed(1)
    for names in sorted(map(sorted, found.keys() ^ named.keys())):
        cell.fail(
            0,
            f"{arrangement}: {names[0]} and {names[1]} "
            + ("share bytes unnamed" if frozenset(names) in found else "share no bytes but are named"),
        )
    spans = _spans(program)
    for pair, span in found.items():
        (one, (begin, end)), (two, (start, stop)) = ((name, spans[name]) for name in sorted(pair))
        if not (end < start or stop < begin) or plan.by_name[one].kind != "reusable":
            cell.fail(
                0,
                f"{arrangement}: {one} (steps {begin}..{end}) and {two} (steps {start}..{stop}) share "
                f"{span} while both are alive",
            )
    index, latent = (plan.by_name[name] for name in program.histories)
    together = frozenset((index.buffer, latent.buffer))
    if arrangement == "base" and together in found:
        cell.fail(0, f"base: the histories share bytes {found[together]}")
    if arrangement == "alias" and not _is_head(index, latent):
        cell.fail(
            0,
            f"alias: index history [{index.offset}, {index.stop}) is not the head of the latent history "
            f"[{latent.offset}, {latent.stop})",
        )


def _spans(program: Program) -> dict[str, tuple[int, int]]:
    """Buffer -> positions of the first and the last step that touches it; the caller's buffers reach past the steps."""
    spans: dict[str, tuple[int, int]] = {}
    for at, step in enumerate(program.steps):
        for _, name in step.accesses():
            spans[name] = (min(at, spans.get(name, (at, at))[0]), at)
    for name in program.outputs:
        spans[name] = (spans[name][0], len(program.steps))
    for name in program.inputs:
        spans[name] = (-1, spans[name][1])
    return spans


def _is_head(index: Place, latent: Place) -> bool:
    return index.kind == latent.kind and index.offset == latent.offset and index.stop <= latent.stop


def saving(sheet: Sheet, base: Plan, alias: Plan, *, requested: Mapping[str, int], record: int) -> None:
    """A1: the difference is exactly the index history, by the plans and by what the arenas asked the system for.

    requested: arrangement -> sum of the segments' logical bytes as mapped; record: bytes of one index record
    """
    wanted = record * base.limits.tokens
    for name, difference in (("plans", base.total - alias.total), ("arenas", requested["base"] - requested["alias"])):
        sheet.cell("A1").check(
            difference == wanted, 1, f"{name}: base minus alias is {difference} bytes, the index history has {wanted}", wanted
        )


def mapped_bytes(sheet: Sheet, mappings: Mapping[str, list[Mapped]], plans: Mapping[str, Plan]) -> dict[str, dict[str, int]]:
    """A2: every mapping is a planned segment in whole pages, wholly resident, and nothing else explains the difference.

    mappings: arrangement -> mappings of its memfds, read at its seal and before any other process opened them
    Returns arrangement -> segment -> mapped bytes.
    """
    cell, found = sheet.cell("A2"), {}
    for name, plan in plans.items():
        sizes = {m.name.removeprefix("palimpsest-"): m for m in mappings[name]}
        found[name] = {kind: m.nbytes for kind, m in sizes.items()}
        for segment in plan.segments:
            pages = -(-segment.nbytes // PAGE) * PAGE
            mapped = sizes.get(segment.kind)
            good = mapped is not None and mapped.nbytes == pages and mapped.pss == pages
            shown = "is not mapped" if mapped is None else f"maps {mapped.nbytes} bytes with {mapped.pss} proportionally resident"
            cell.check(good, 1, f"{name}: segment {segment.kind} of {segment.nbytes} bytes {shown}, {pages} expected", pages)
        if len(sizes) != len(plan.segments) or len(mappings[name]) != len(sizes):
            cell.fail(0, f"{name}: {len(mappings[name])} mappings for {len(plan.segments)} segments")
    kinds = set(found["base"]) | set(found["alias"])
    named = sum(found["base"].get(k, 0) - found["alias"].get(k, 0) for k in kinds)
    residual = sum(m.nbytes for m in mappings["base"]) - sum(m.nbytes for m in mappings["alias"]) - named
    cell.check(residual == 0, 1, f"{residual} mapped bytes of the difference belong to no named mapping")
    return found


def lint(sheet: Sheet, folder: Path, rank: int, ranks: int) -> int:
    """V5 over the qualifier's source: each rank reads its share of the files. Returns how many there are in all."""
    files = sorted(p for p in folder.rglob("*.py") if p.name != "lint.py")
    mine = files[rank::ranks]
    sheet.expect("V5", len(mine))
    for path in mine:
        findings = lint_source(path.read_text(encoding="utf-8"), path.name)
        sheet.cell("V5").check(not findings, 1, str(findings[0]) if findings else "", path.stat().st_size)
    return len(files)


def addresses(arena: Arena) -> dict[str, int]:
    """Buffer -> address of its first byte, as its view says."""
    return {p.buffer: arena.raw(p.buffer).data_ptr() for p in arena.plan.places}


def moved(arena: Arena, sealed: Mapping[str, int]) -> list[str]:
    """Buffers whose view, or whose planned offset in its segment, is not at the sealed address."""
    found = []
    for name, address in addresses(arena).items():
        if address != sealed.get(name) or address != arena.address(name):
            found.append(f"{name} is at {address:#x}, sealed at {sealed.get(name, 0):#x}, planned at {arena.address(name):#x}")
    return found


def case_gates(sheet: Sheet, o: Observation, *, views: int, slack: list[str], tokens_rows: int, where: str) -> None:
    """S4, S6, A3, X4, X6, V2 of one replay. views: of this arrangement; tokens_rows: prepared rows (units of the visible vector
    in X4).
    """
    sheet.cell("S4").check(not o.moved, 2 * views, f"{where}: {o.moved[0] if o.moved else ''}")
    early = f"{where}: bytes {o.early_damage} changed before the latent gather though no step so far may write them"
    sheet.cell("S6").check(o.early_damage is None, 1, early, o.early_bytes)
    damage = [str(o.end_damage)] if o.end_damage else slack
    sheet.cell("S6").check(
        not damage, 1, f"{where}: bytes outside the declared write set changed: {damage[0] if damage else ''}", o.kept_bytes
    )
    sheet.cell("A3").check(not o.allocated, 1, f"{where}: {o.allocated[0] if o.allocated else ''}")
    for name, found in (("index", o.index), ("latent", o.latent)):
        text = f"{where}: token {found.first_bad} of the {name} history is not what the persistent cache holds"
        sheet.cell("X4").check(found.first_bad is None, found.tokens, text, found.nbytes)
    _visible(sheet, o, tokens_rows, where)
    for name, before, after in zip(("caller's rows", "weights", "tables"), o.inputs_before, o.inputs_after, strict=True):
        sheet.cell("X6").check(before == after, 1, f"{where}: the {name} changed")
    good = o.poisoned > 0 and o.overwritten > 0 and o.end_damage is None
    sheet.cell("V2").check(
        good,
        1,
        f"{where}: {o.poisoned} bytes poisoned, {o.overwritten} overwritten, residual damaged at {o.end_damage}",
        o.poisoned,
    )


def _visible(sheet: Sheet, o: Observation, rows: int, where: str) -> None:
    """The visible(r) vector: row r ranked exactly history + r + 1 scores; the counts of all rows follow from it."""
    cell = sheet.cell("X4")
    own = o.own if o.ranked else 0
    wrong = [
        r
        for r in range(own)
        if r + o.first_row not in o.scores or o.scores[r + o.first_row].count != o.history + o.first_row + r + 1
    ]
    if wrong:
        row = wrong[0] + o.first_row
        got = o.scores[row].count if row in o.scores else 0
        cell.fail(0, f"{where} row {row}: {got} scores were ranked, {o.history + row + 1} tokens are visible")
    if o.complaints:
        cell.fail(0, f"{where}: {o.complaints[0]}")
    counts, numbers = o.array("counts", np.int32, rows), np.arange(rows)
    topk = o.copies["ids"].nbytes // 4 // rows
    expected = np.where(numbers < o.rows, np.minimum(o.history + numbers + 1, topk), 0)
    cell.check(bool((counts == expected).all()), rows, f"{where}: the counts of the rows are not min(k, visible)", counts.nbytes)


def persistence(
    sheet: Sheet, o: Observation, made: Mapping[str, Mapping[int, Bytes]], *, page: int, ranks: int, rank: int, where: str
) -> None:
    """S5: pages without appended tokens are unchanged, the others changed in the appended records only, and those are as
    ``made``.
    """
    cell = sheet.cell("S5")
    for cache, before in o.pages_before.items():
        touched = o.touched[cache]
        same = before == o.pages_after[cache]
        same[list(touched)] = True
        bad = np.flatnonzero(~same)
        cell.check(
            not len(bad),
            len(before),
            f"{where}: page {int(bad[0]) if len(bad) else 0} of {cache} changed without an appended token",
        )
        for local, old in touched.items():
            number = local * ranks + rank
            first, stop = max(o.history - number * page, 0), min(o.visible - number * page, page)
            expected = _with_records(old, made[cache][local], first, stop, page=page, planes=_widths(cache, old, page))
            found = o.appended[cache][local]
            cell.n_bytes += found.nbytes
            if not np.array_equal(found, expected):
                at = int(np.flatnonzero(found != expected)[0])
                cell.fail(
                    0,
                    f"{where}: byte {at} of page {local} of {cache} is not what appending tokens "
                    f"{first}..{stop - 1} of it writes",
                )


def _widths(cache: str, page_bytes: Bytes, page: int) -> tuple[int, ...]:
    """Bytes of one token in each plane of a page: an fp8 index page holds values, then scales."""
    record = len(page_bytes) // page
    return (record - 4, 4) if cache == "index_cache" and record % 16 == 4 else (record,)


def _with_records(old: Bytes, new: Bytes, first: int, stop: int, *, page: int, planes: tuple[int, ...]) -> Bytes:
    """``old`` with the records of tokens [first, stop) of the page taken from ``new``."""
    made, at = old.copy(), 0
    for width in planes:
        span = slice(at + first * width, at + stop * width)
        made[span] = new[span]
        at += page * width
    return made
