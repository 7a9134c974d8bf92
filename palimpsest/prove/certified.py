"""Certified selection (gates K7 and K4 of a foreign selector): a set is right when exact scores of the persistent bytes say so.

Every visible key of every row is scored in fp64 with a rigorous error. Keys whose error cannot move them across the cutoff are
settled; the few others are scored with integers. A set is accepted when it holds every id above the exact cutoff and fills up
with ids exactly at it, in any choice: so a selector may break ties as it likes and may do nothing else. Where its choice
differs from the stated rule (lowest ids first), a certificate says why that is a tie.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from palimpsest.prove import ties
from palimpsest.prove.capture import Observation
from palimpsest.prove.certificate import check_certificate
from palimpsest.prove.exact import Cutoff, Filtered, decode_keys, filtered_scores
from palimpsest.prove.gates_select import CHUNK, Judge, joined

#: rows scored together, so that keys are read and decoded once for all of them
_GROUP = 16

F64 = NDArray[np.float64]


class CertifiedJudge(Judge):
    """Judges the ids of a selector that shows no scores. ``selected`` is called once its step is over, before anybody uses the
    ids.
    """

    gate = "K7"

    def selected(self) -> None:
        """All rows of this rank's slice."""
        o = self.observation
        assert o is not None
        stop = o.first_row + o.own
        for first in range(o.first_row, stop, _GROUP):
            rows = range(first, min(first + _GROUP, stop))
            found = self._scores(rows)
            for row in rows:
                self._certify(o, row, found.pop(row))

    def _scores(self, rows: range) -> dict[int, Filtered]:
        """Filtered exact scores of every key each row sees, from the persistent caches of all ranks."""
        o, f = self.observation, self.facts
        assert o is not None
        asked = {row: self._row(row) for row in rows}
        parts: dict[int, list[Filtered]] = {row: [] for row in rows}
        longest = o.history + rows[-1] + 1
        for start in range(0, longest, CHUNK):
            values, scales = self.caches.index(start, min(start + CHUNK, longest), f.dim, f.format == "fp8")
            keys = decode_keys(values, f.format)
            for row in rows:
                n = min(len(keys), o.history + row + 1 - start)
                if n > 0:
                    parts[row].append(filtered_scores(asked[row], keys[:n], None if scales is None else scales[:n]))
        return {row: joined(found) for row, found in parts.items()}

    def _certify(self, o: Observation, row: int, found: Filtered) -> None:
        ids, counts = self._ids()
        slot, n, cell = row - o.first_row, len(found.value), self.sheet.cell(self.gate)
        picked = ids[slot, : int(np.clip(counts[slot], 0, self.facts.topk))]
        self.judged[row] = picked.copy()
        where = f"{self.where} row {row}"
        if not np.isfinite(found.value).all():
            cell.fail(1, f"{where}: its exact scores are not finite")
            if self.plan.base_ids is not None:
                self.sheet.cell("K4").fail(1, f"{where}: its exact scores are not finite")
            return
        self.density.add(picked, found.value)
        if row - 1 in self.judged:
            self.density.neighbours(self.judged[row - 1], picked)
        cutoff = self._cutoff(row, found)
        fault = selection_fault(picked, cutoff, found.value)
        chosen = np.sort(np.concatenate([cutoff.above, cutoff.equal[: cutoff.needed]]))
        moved = ties.difference(chosen, picked)
        if not fault and moved and self.plan.base_ids is not None:
            fault = self._prove(o, row, moved, cutoff, between=("rule", "alias"))
        cell.check(not fault, 1, f"{where}: {fault}", n * (self.facts.dim + 4))
        if row in self.plan.lattice:
            counted = self._tie_count(row, picked, found.value)
            if counted is not None:
                self._count_ties(counted)
        if self.plan.base_ids is not None:
            self._between(o, row, ties.difference(self.plan.base_ids[slot], ids[slot]), cutoff)

    def _between(self, o: Observation, row: int, found: ties.Difference, cutoff: Cutoff) -> None:
        """K4 of one row: the arrangements chose the same ids, or every id in which they differ is an exact tie."""
        cell, n, fault = self.sheet.cell("K4"), o.history + row + 1, ""
        if found and not all(0 <= i < n for i in (*found.only_base, *found.only_alias)):
            fault = "the arrangements differ in ids that are not visible"
        elif found:
            fault = self._prove(o, row, found, cutoff, between=("base", "alias"))
        cell.check(not fault, 1, f"{self.where} row {row}: {fault}", 4 * self.facts.topk)

    def _prove(self, o: Observation, row: int, found: ties.Difference, cutoff: Cutoff, *, between: tuple[str, str]) -> str:
        """Keep a certificate; empty when it proves that each differing id is an exact tie, else the first fault."""
        f, slot = self.facts, row - o.first_row
        slots = len(self._ids()[0])
        tie_row = ties.TieRow(
            row=row,
            rank=row // slots,
            topk=f.topk,
            visible=o.history + row + 1,
            format=f.format,
            heads=f.heads,
            dim=f.dim,
            query=o.copies["index_query"][slot].tobytes(),
            weights=o.copies["head_weights"][slot].tobytes(),
        )
        made = ties.certificate(tie_row, found, cutoff, self.record, model=f.model)
        faults = check_certificate(made, self.record)
        faults += [f"id {m['id']} is a {m['class']}" for m in made["members"] if m["class"] != "exact_tie"]
        used = sorted({made["kth"]["id"], *found.only_base, *found.only_alias})
        self.certificates.append(
            {"between": list(between), "certificate": made, "records": {str(i): self.record(i).hex() for i in used}}
        )
        return faults[0] if faults else ""


def selection_fault(picked: NDArray[Any], cutoff: Cutoff, value: F64) -> str:
    """Empty when ``picked`` is a valid top-k of the exact scores behind ``cutoff``; else what is wrong, with the scores
    (``value`` [n], for the text).
    """
    faults = ties.exact_faults(picked, cutoff, len(value))
    if not faults:
        return ""
    inside = np.asarray([i for i in picked.tolist() if 0 <= i < len(value)], np.int64)
    missing = np.setdiff1d(cutoff.above, inside)
    below = np.setdiff1d(np.setdiff1d(inside, cutoff.above), cutoff.equal)
    said = [faults[0]]
    if len(missing):
        said.append(f"id {int(missing[0])} scores {value[missing[0]]:.9g} and was left out")
    if len(below):
        said.append(f"id {int(below[0])} scores {value[below[0]]:.9g} and was taken")
    tau = (
        "no cutoff"
        if cutoff.tau is None
        else f"the cutoff is {float(cutoff.tau):.9g}, {len(cutoff.equal)} at it, {cutoff.needed} needed"
    )
    return "; ".join([*said, tau])
