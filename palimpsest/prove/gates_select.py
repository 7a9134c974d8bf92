"""Gates K1-K6: what was ranked, what was selected, and what the persistent bytes say should have been.

A Judge follows one replay of one arrangement. It sees every row's ranked scores once, while the block that holds them exists,
and recomputes scores of audited and of lattice rows from the persistent caches of all ranks, which it reads past the transport.
What it says of a row is a function of bytes: those of the ranked scores, the ids, the query and the index records. A row whose
bytes were all judged before, in another replay or the other arrangement, is recognised by their digest and counted again.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palimpsest.prove import ties
from palimpsest.prove.bounds import exact_dots, score_error
from palimpsest.prove.capture import Observation
from palimpsest.prove.certificate import check_certificate
from palimpsest.prove.density import Density
from palimpsest.prove.exact import (
    Cutoff,
    Exact,
    Filtered,
    IndexRow,
    decode_keys,
    exact_cutoff,
    filtered_scores,
    refiner,
)
from palimpsest.prove.expect import TIE_CONDITIONS
from palimpsest.prove.gates import Sheet
from palimpsest.prove.lattice import Lattice
from palimpsest.prove.peers import Caches
from palimpsest.prove.scores import RowScores
from palimpsest.prove.verdicts import Counters, IndexFacts, Plan, TieCount, Verdict

#: tokens whose keys are decoded at once; a multiple of any page
CHUNK = 1 << 14

F64 = NDArray[np.float64]


class Judge:
    """Judges the blocks of one replay. ``certificates`` collects what K4 had to prove.

    gate: the one that says each set is right; known: digest of a row's bytes -> what was found of them, shared by all replays
    metered: torch's allocator is being watched, so nothing here may use torch
    """

    gate = "K2"

    def __init__(
        self,
        sheet: Sheet,
        facts: IndexFacts,
        plan: Plan,
        *,
        where: str,
        counters: Counters,
        ids: Callable[[], tuple[Any, Any]],
        caches: Caches,
        known: dict[bytes, Verdict],
    ):
        self.known, self._records, self.metered = known, b"", False
        self.sheet, self.facts, self.plan, self.where, self.counters, self.caches = sheet, facts, plan, where, counters, caches
        self._ids = ids
        self.observation: Observation | None = None
        self.certificates: list[dict[str, Any]] = []
        self.judged: dict[int, NDArray[np.int32]] = {}
        self.density = Density()

    def block(self, first: int, scores: list[NDArray[np.float32]], rows: list[RowScores]) -> None:
        """Rows first, first + 1, ... with their visible scores, at the moment their ids are written."""
        assert self.observation is not None
        ids, counts = self._ids()
        picked, keys = {}, {}
        for row, kept in enumerate(rows, first):
            slot = row - self.observation.first_row
            picked[row] = ids[slot, : int(np.clip(counts[slot], 0, self.facts.topk))].copy()
            keys[row] = self._key(row, picked[row], kept)
        fresh = self._fresh(first, scores, {row: picked[row] for row, key in keys.items() if key not in self.known})
        for row, ranked in enumerate(scores, first):
            self.judged[row] = picked[row]
            if row - 1 in self.judged:
                self.density.neighbours(self.judged[row - 1], picked[row])
            found = fresh[row] if row in fresh else self.known[keys[row]]
            if found.good:
                self.known[keys[row]] = found
            self._count(row, found, ranked)
            if self.plan.base_ids is not None:
                slot = row - self.observation.first_row
                self._compare(row, self.plan.base_ids[slot], ids[slot], ranked)

    def _key(self, row: int, picked: NDArray[np.int32], kept: RowScores) -> bytes:
        """A digest of everything that the judgement of a row depends on."""
        o, plan = self.observation, self.plan
        assert o is not None
        slot, made = row - o.first_row, hashlib.blake2b(digest_size=16)
        for part in (kept.digest, self._index_digest()):
            made.update(part)
        for array in (picked, o.copies["index_query"][slot], o.copies["head_weights"][slot]):
            made.update(array.data)
        asked = (kept.count, len(picked), row in plan.audited, row in plan.lattice, row == plan.zero_row, plan.planted)
        made.update(repr(asked).encode())
        return made.digest()

    def _index_digest(self) -> bytes:
        """A digest of the visible index records in the persistent caches, which no step of the replay changes any more."""
        if not self._records:
            o, f, made = self.observation, self.facts, hashlib.blake2b(digest_size=16)
            assert o is not None
            for _, _, pages in self.caches.shards("index_cache", o.visible, f.dim + 4 if f.format == "fp8" else 4 * f.dim):
                made.update(pages.data)
            self._records = made.digest()
        return self._records

    def _fresh(self, first: int, scores: list[NDArray[np.float32]], rows: dict[int, NDArray[np.int32]]) -> dict[int, Verdict]:
        """Judge rows that were not judged before; their selected ids are given."""
        out = {}
        audited, lattice = self._exact(first, scores, set(rows))
        for row, picked in rows.items():
            ranked = scores[row - first]
            found = out[row] = Verdict("; ".join(ties.validity_faults(picked, ranked, self.facts.topk)))
            found.density.add(picked, ranked)
            found.lattice = lattice.get(row)
            if row in audited:
                found.truth, found.off = self._truth(row, picked, ranked, audited[row])
            if row in self.plan.lattice:
                found.ties = self._tie_count(row, picked, ranked)
        return out

    def _count(self, row: int, found: Verdict, ranked: NDArray[np.float32]) -> None:
        """Enter what was found of a row into the cells and counters."""
        where, n, f = f"{self.where} row {row}", len(ranked), self.facts
        self.sheet.cell("K2").check(not found.valid, 1, f"{where}: {found.valid}", ranked.nbytes)
        self.density.join(found.density)
        if found.lattice is not None:
            self.sheet.cell("K5").check(not found.lattice, 1, f"{where}: {found.lattice}", ranked.nbytes)
        if found.truth is not None:
            cell = self.sheet.cell("K3")
            cell.check(not found.truth, n, f"{where}: {found.truth}", n * (f.dim + 4))
            if not found.truth:
                cell.extreme(found.off)
        if found.ties is not None:
            self._count_ties(found.ties)

    def _count_ties(self, found: TieCount) -> None:
        """For K6 and V3."""
        c = self.counters
        c.tie_rows += found.tied
        c.sides, c.shards = max(c.sides, found.sides), max(c.shards, found.shards)
        c.zero_rows += found.zero
        c.seen |= found.seen
        c.missed |= found.missed

    def _row(self, row: int) -> IndexRow:
        o, f = self.observation, self.facts
        assert o is not None
        slot = row - o.first_row
        query = o.copies["index_query"][slot].reshape(f.heads, -1)
        return IndexRow.from_bytes(query, o.copies["head_weights"][slot].view("<f4"), f.format)

    def _exact(self, first: int, scores: list[NDArray[np.float32]], rows: set[int]) -> tuple[dict[int, Filtered], dict[int, str]]:
        """Of ``rows``: filtered exact scores of the audited ones; what is wrong with the ranked scores of the lattice ones."""
        audited, lattice = sorted(rows & self.plan.audited), sorted(rows & self.plan.lattice)
        parts: dict[int, list[Filtered]] = {row: [] for row in audited}
        if not audited and not lattice:
            return {}, {}
        asked = {row: self._row(row) for row in {*audited, *lattice}}
        whole = None if self.metered else Lattice.of([asked[row] for row in lattice])
        wrong = dict.fromkeys(lattice, "")
        longest = max(len(scores[row - first]) for row in asked)
        for start in range(0, longest, CHUNK):
            values, scales = self.caches.index(start, min(start + CHUNK, longest), self.facts.dim, self.facts.format == "fp8")
            known = whole.scores(values, scales) if whole is not None and not any(wrong.values()) else None
            keys = decode_keys(values, self.facts.format) if known is None or audited else None
            for row, index_row in asked.items():
                ranked = scores[row - first][start : start + len(values)]
                if not len(ranked):
                    continue
                if row in wrong and known is not None:
                    wrong[row] = wrong[row] or _difference(known[lattice.index(row), : len(ranked)], ranked, start)
                if row not in parts and known is not None:
                    continue
                assert keys is not None
                seen = None if scales is None else scales[: len(ranked)]
                found = filtered_scores(index_row, keys[: len(ranked)], seen, spread=self._spread)
                if row in wrong and known is None:
                    wrong[row] = wrong[row] or _lattice_fault(found, ranked, start)
                if row in parts:
                    parts[row].append(found)
        return {row: joined(found) for row, found in parts.items() if found}, wrong

    def _cutoff(self, row: int, found: Filtered) -> Cutoff:
        """The exact cutoff of a row, from its filtered scores and, where they do not decide, from integers over the persistent
        bytes.
        """
        return exact_cutoff(
            found.value, found.error, min(self.facts.topk, len(found.value)), refiner(self._row(row), self._read_index)
        )

    def _read_index(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """Index records of a few ids: value bytes and scales."""
        page, fp8 = self.facts.page, self.facts.format == "fp8"
        values, scales = [], []
        for i in ids.tolist():
            start = i // page * page
            keys, sigma = self.caches.index(start, start + page, self.facts.dim, fp8)
            values.append(keys[i - start])
            scales.append(sigma[i - start] if sigma is not None else 1)
        return np.stack(values), np.asarray(scales, np.float32) if fp8 else None

    def record(self, id: int) -> bytes:
        """Bytes of one index record: values, then (fp8) its scale."""
        values, scales = self._read_index(np.asarray([id], np.int64))
        return values[0].tobytes() + (b"" if scales is None else scales.astype("<f4").tobytes())

    def _truth(self, row: int, picked: NDArray[np.int32], ranked: NDArray[np.float32], found: Filtered) -> tuple[str, float]:
        """K3 of one row: every score within its derived error, every id decided by that error on the right side.

        Returns the first fault, and how much of its allowance the worst score uses.
        """
        f = self.facts
        if not (np.isfinite(ranked).all() and np.isfinite(found.value).all()):
            return "scores that are not finite", 0.0
        allowed = (
            score_error(f.model, value=found.value, mass=found.mass, spread=found.spread, heads=f.heads, dim=f.dim) + found.error
        )
        off = np.abs(ranked.astype(np.float64) - found.value)
        bad = np.flatnonzero(off > allowed)
        if len(bad):
            i = int(bad[0])
            return (
                f"id {i} was ranked at {float(ranked[i]).hex()}, its bytes give "
                f"{float(found.value[i]).hex()} +- {float(allowed[i]).hex()}"
            ), 0.0
        worst = float(np.max(off / np.maximum(allowed, np.finfo(np.float64).tiny)))
        return _side_fault(picked, found, allowed, self._cutoff(row, found)), worst

    def _tie_count(self, row: int, picked: NDArray[np.int32], ranked: NDArray[np.floating]) -> TieCount | None:
        """Ties, all-zero rows and planted records of one lattice row; None when a score is not finite."""
        n = len(ranked)
        if not np.isfinite(ranked).all():
            return None
        values = ranked.astype(np.float64)
        cutoff = exact_cutoff(values, np.zeros(n), min(self.facts.topk, n), _no_refinement)
        found = ties.tie_presence(cutoff, alias_end=self.facts.alias_end, page=self.facts.page, ranks=self.facts.ranks)
        visible = frozenset(i for i in self.plan.planted if i < n) if row != self.plan.zero_row else frozenset()
        return TieCount(
            tied=found.tied,
            sides=found.sides if found.tied else 0,
            shards=found.shards if found.tied else 0,
            zero=n > self.facts.topk and not values.any(),
            seen=visible,
            missed=visible - set(picked.tolist()),
        )

    def _compare(self, row: int, base: NDArray[np.int32], alias: NDArray[np.int32], ranked: NDArray[np.float32]) -> None:
        """K4 of one row: nothing differs, or every differing id is an exact tie, with a certificate."""
        cell, found = self.sheet.cell("K4"), ties.difference(base, alias)
        if not found:
            cell.passed(1, base.nbytes)
            return
        f, o = self.facts, self.observation
        assert o is not None
        start, pieces = 0, []
        while start < len(ranked):
            values, scales = self.caches.index(start, min(start + CHUNK, len(ranked)), f.dim, f.format == "fp8")
            pieces.append(filtered_scores(self._row(row), decode_keys(values, f.format), scales, spread=self._spread))
            start += CHUNK
        slot = row - o.first_row
        tie_row = ties.TieRow(
            row=row, rank=row // self._slots, topk=f.topk, visible=len(ranked), format=f.format, heads=f.heads, dim=f.dim,
            query=o.copies["index_query"][slot].tobytes(), weights=o.copies["head_weights"][slot].tobytes(),
        )  # fmt: skip
        cutoff = self._cutoff(row, joined(pieces))
        wanted = [i for i in (*found.only_base, *found.only_alias, int(cutoff.equal[0])) if 0 <= i < len(ranked)]
        if len(wanted) != len(found.only_base) + len(found.only_alias) + 1:
            cell.fail(1, f"{self.where} row {row}: the arrangements differ in ids that are not visible")
            return
        bits = {i: int(ranked[i : i + 1].view(np.uint32)[0]) for i in wanted}
        certificate = ties.certificate(tie_row, found, cutoff, self.record, model=f.model, bits=bits)
        faults = check_certificate(certificate, self.record)
        faults += [f"id {m['id']} is a {m['class']}" for m in certificate["members"] if m["class"] != "exact_tie"]
        self.certificates.append(
            {
                "between": ["base", "alias"],
                "certificate": certificate,
                "records": {str(i): self.record(i).hex() for i in sorted(set(wanted))},
            }
        )
        cell.check(not faults, 1, f"{self.where} row {row}: {'; '.join(faults[:3])}", base.nbytes)

    @property
    def _spread(self) -> bool:
        """Whether the engine's dots round, so that its error depends on their spread."""
        return not exact_dots(self.facts.model, self.facts.format)

    @property
    def _slots(self) -> int:
        ids, _ = self._ids()
        return len(ids)


def _no_refinement(ids: NDArray[np.int64]) -> list[Exact]:
    raise AssertionError("scores without error need no refinement")


def joined(parts: list[Filtered]) -> Filtered:
    spreads = [p.spread for p in parts if p.spread is not None]
    return Filtered(
        np.concatenate([p.value for p in parts]),
        np.concatenate([p.error for p in parts]),
        np.concatenate([p.mass for p in parts]),
        np.concatenate(spreads) if spreads else None,
    )


def _lattice_fault(found: Filtered, ranked: NDArray[np.float32], start: int) -> str:
    """Empty when every exact score is exact and equal to the ranked one."""
    if found.error.any():
        return f"the score of id {start + int(np.flatnonzero(found.error)[0])} is not on the lattice"
    return _difference(found.value, ranked, start)


def _difference(exact: NDArray[np.floating], ranked: NDArray[np.float32], start: int) -> str:
    """Empty when the ranked scores of ids start, start + 1, ... are the exact ones."""
    bad = np.flatnonzero(exact != ranked)
    if not len(bad):
        return ""
    i = int(bad[0])
    return f"id {start + i} was ranked at {float(ranked[i])}, its bytes give {float(exact[i])}"


def _side_fault(picked: NDArray[np.int32], found: Filtered, allowed: F64, cutoff: Cutoff) -> str:
    """Empty when every id that the error cannot move across the cutoff is on its side of it."""
    if cutoff.tau is None:
        return ""
    tau, slack = float(cutoff.tau), float(allowed[cutoff.equal].max())
    chosen = np.zeros(len(found.value), bool)
    inside = picked[(picked >= 0) & (picked < len(chosen))]
    chosen[inside] = True
    missing = np.flatnonzero((found.value - allowed > tau + slack) & ~chosen)
    if len(missing):
        return f"id {int(missing[0])} lies above the cutoff beyond any rounding and is not selected"
    wrong = np.flatnonzero((found.value + allowed < tau - slack) & chosen)
    return f"id {int(wrong[0])} lies below the cutoff beyond any rounding and is selected" if len(wrong) else ""


def minima(sheet: Sheet, wanted: dict[str, int], found: dict[str, int]) -> None:
    """K6 and V3: what the case was built to show is there, on all ranks together; INCONCLUSIVE otherwise."""
    for gate, names in (("K6", TIE_CONDITIONS if wanted["tie_rows"] else ()), ("V3", tuple(n for n, v in wanted.items() if v))):
        for name in names:
            cell = sheet.cell(gate)
            if found[name] >= wanted[name]:
                cell.passed(1)
            else:
                cell.fail(1, f"{name}: {found[name]} found, at least {wanted[name]} needed", "INCONCLUSIVE")


def emitted(sheet: Sheet, o: Observation, judge: Judge, rows: int, where: str) -> None:
    """The ids that reached the attention are, row by row, those that were judged when the selector wrote them (part of K2)."""
    ids, counts = o.array("ids", np.int32, rows, judge.facts.topk), o.array("counts", np.int32, rows)
    for row in range(o.first_row, o.first_row + o.own):
        if row not in judge.judged or not np.array_equal(ids[row, : counts[row]], judge.judged[row]):
            sheet.cell(judge.gate).fail(
                0, f"{where} row {row}: the ids that reached the attention are not those the selector ranked"
            )
            return


def structure(sheet: Sheet, o: Observation, facts: IndexFacts, rows: int, where: str) -> None:
    """K1 over the ids every rank holds (all prepared ``rows``) and over the active rows of this rank's own slice."""
    cell, k = sheet.cell("K1"), facts.topk
    everywhere = ties.structure_faults(
        o.array("ids", np.int32, rows, k), o.array("counts", np.int32, rows), history=o.history, rows=o.rows, topk=k
    )
    local = o.array("local_counts", np.int32, 2, -1)[0, : o.own]
    ids = o.array("local_ids", np.int32, -1, k)[: o.own]
    mine = ties.structure_faults(ids, local, history=o.history, rows=o.rows, topk=k, first_row=o.first_row)
    for name, units, faults in (("ids", rows, everywhere), ("local ids", o.own, mine)):
        text = f"{where} {name} row {faults[0][0]}: {faults[0][1]}" if faults else ""
        cell.check(not faults, units, text, units * k * 4)
