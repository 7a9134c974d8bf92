"""Gates O0, O1, O1s, O2, O6: the output is the recorded tail in the emitted order, and lies where an oracle puts it."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from palimpsest.kernels.call import TORCH_DTYPES
from palimpsest.prove.bounds import Arithmetic
from palimpsest.prove.capture import Bytes, Observation
from palimpsest.prove.exact import decode_activation
from palimpsest.prove.gates import Sheet
from palimpsest.prove.oracle import ContextCheck, LatentFormat, attend, check_context
from palimpsest.prove.tail import Tail, as_activation, tree_sum


@dataclass(frozen=True)
class OutputFacts:
    """Prepared rows, top-k, local heads, hidden size, activation dtype name, softmax scale, the latent record's layout, the
    engine's arithmetic.
    """

    rows: int
    topk: int
    heads: int
    hidden: int
    activation: str
    softmax_scale: float
    layout: LatentFormat
    model: Arithmetic


#: chunk rows whose tail is computed at once
TAIL_ROWS = 512


class Oracle:
    """O2, and what is known of the tail. The check of a row is a function of its records, query and context alone, its tail of
    records, ids, query and hidden row: equal bytes are computed once and counted each time.

    tails: digest of what a row's tail depends on -> digests of its context and partial output
    """

    def __init__(self, facts: OutputFacts):
        self.facts = facts
        self._known: dict[bytes, ContextCheck] = {}
        self.tails: dict[bytes, tuple[bytes, bytes]] = {}

    def check(self, o: Observation, row: int, ids: NDArray[np.int32]) -> ContextCheck:
        """Every coordinate of every local head of one row."""
        f, records = self.facts, o.records(ids)
        made = hashlib.blake2b(digest_size=16)
        for part in (records, o.copies["query"][row], o.copies["context"][row]):
            made.update(np.ascontiguousarray(part).data)
        if made.digest() not in self._known:
            query = decode_activation(o.copies["query"][row].reshape(f.heads, -1), f.activation)
            truth = attend(records, query, f.layout, softmax_scale=f.softmax_scale, arithmetic=f.model)
            self._known[made.digest()] = check_context(
                o.copies["context"][row].view("<f4").reshape(f.heads, f.layout.kv_lora), truth
            )
        return self._known[made.digest()]


def tail_gates(sheet: Sheet, o: Observation, oracle: Oracle, tail: Tail, audited: tuple[int, ...], where: str) -> None:
    """O0, O1s, O2 and the attention and projection half of O1."""
    f = oracle.facts
    ids, counts = o.array("ids", np.int32, f.rows, f.topk), o.array("counts", np.int32, f.rows)
    if o.rows and not _usable(ids[: o.rows], counts[: o.rows], o):
        _unusable(sheet, o, f, audited, where)
        return
    tails = _tails(oracle, tail, o, ids, counts) if o.rows else []
    for row, known in enumerate(tails):
        context, partial = o.copies["context"][row], o.copies["partial"][row]
        same = (_digest(context), _digest(partial)) == known
        part = "context" if _digest(context) != known[0] else "partial output"
        text = f"{where} row {row}: the {part} is not the tail's on the emitted ids"
        sheet.cell("O1").check(same, 1, text, context.nbytes + partial.nbytes)
    if audited:
        _again(sheet, o, f, tail, np.asarray(audited), [tails[row][0] for row in audited], where)
        for row in audited:
            _oracle(sheet, o, oracle, row, ids[row, : counts[row]], where)


def _digest(*parts: NDArray[np.generic] | bytes) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return made.digest()


def _tails(
    oracle: Oracle, tail: Tail, o: Observation, ids: NDArray[np.int32], counts: NDArray[np.int32]
) -> list[tuple[bytes, bytes]]:
    """Digests of the context and the partial output that every active row must have."""
    hidden = o.copies["hidden"]
    keys = [_digest(o.latents_digest, ids[row, : counts[row]], o.copies["query"][row], hidden[row]) for row in range(o.rows)]
    fresh = np.asarray([row for row, key in enumerate(keys) if key not in oracle.tails], np.int64)
    for start in range(0, len(fresh), TAIL_ROWS):
        rows = fresh[start : start + TAIL_ROWS]
        context = tail.attend(o, ids[rows], counts[rows], rows)
        partial = tail.project(o, context, rows)
        for at, row in enumerate(rows.tolist()):
            oracle.tails[keys[row]] = _digest(context[at]), _digest(partial[at])
    return [oracle.tails[key] for key in keys]


def _usable(ids: NDArray[np.int32], counts: NDArray[np.int32], o: Observation) -> bool:
    """Whether the ids can be looked up at all; K1 says what is wrong with them otherwise."""
    slots = np.arange(ids.shape[1]) < counts[:, None]
    inside = (ids >= 0) & (ids < o.visible)
    return bool(
        (counts >= 0).all()
        and (counts <= ids.shape[1]).all()
        and (inside | ~slots).all()
        and (counts > 0).all()
        and (ids[~slots] < 0).all()
    )


def _unusable(sheet: Sheet, o: Observation, f: OutputFacts, audited: tuple[int, ...], where: str) -> None:
    text = f"{where}: the emitted ids cannot be looked up, see K1"
    units = {"O0": len(audited), "O1": o.rows, "O1s": 1 if o.rows else 0, "O2": len(audited) * f.heads * f.layout.kv_lora}
    for gate, count in units.items():
        if count:
            sheet.cell(gate).fail(count, text)


def _again(
    sheet: Sheet, o: Observation, f: OutputFacts, tail: Tail, rows: NDArray[np.int64], contexts: list[bytes], where: str
) -> None:
    """O0: the audited rows once more, alone, give the contexts with these digests; O1s: the same ids in reverse order give other
    bytes in at least one of them."""
    ids, counts = o.array("ids", np.int32, f.rows, f.topk)[rows], o.array("counts", np.int32, f.rows)[rows]
    once = tail.attend(o, ids, counts, rows)
    for at, row in enumerate(rows.tolist()):
        same = _digest(once[at]) == contexts[at]
        sheet.cell("O0").n_bytes += once[at].nbytes
        if same:
            sheet.cell("O0").passed(1)
        else:
            sheet.cell("O0").fail(1, f"{where} row {row}: the tail's bytes differ between two runs", "INCONCLUSIVE")
    turned = ids.copy()
    for at, count in enumerate(counts):
        turned[at, :count] = ids[at, :count][::-1]
    other = tail.attend(o, turned, counts, rows)
    moved = int(sum(not np.array_equal(other[at], once[at]) for at in range(len(rows))))
    cell = sheet.cell("O1s")
    cell.extreme(moved)
    if moved:
        cell.passed(1, other.nbytes)
    else:
        cell.fail(
            1,
            f"{where}: reversing the ids changes no byte of {len(rows)} audited rows, so the order check is empty",
            "INCONCLUSIVE",
        )


def _oracle(sheet: Sheet, o: Observation, oracle: Oracle, row: int, ids: NDArray[np.int32], where: str) -> None:
    """O2 of one row."""
    cell, found = sheet.cell("O2"), oracle.check(o, row, ids)
    cell.extreme(found.worst)
    text = (
        f"{where} row {row}: {found.faults} of {found.checked} coordinates outside the bound, the first at "
        f"(head, feature) {found.first}"
    )
    cell.check(not found.faults, found.checked, text, len(ids) * oracle.facts.layout.record_bytes)


def reduced(sheet: Sheet, o: Observation, f: OutputFacts, partials: list[Bytes], where: str) -> None:
    """The second half of O1: the output is the fixed tree over all ranks' partial rows [rows, bytes], rounded once; rows past the
    chunk were left alone.
    """
    cell = sheet.cell("O1")
    dtype = TORCH_DTYPES[f.activation]
    output = o.copies["output"].reshape(f.rows, -1)
    for start in range(0, o.rows, TAIL_ROWS):
        stop = min(start + TAIL_ROWS, o.rows)
        parts = [np.ascontiguousarray(p[start:stop]).reshape(-1).view("<f4").reshape(stop - start, f.hidden) for p in partials]
        bad = np.flatnonzero((as_activation(tree_sum(parts), dtype) != output[start:stop]).any(axis=1))
        if len(bad):
            row = start + int(bad[0])
            cell.fail(0, f"{where} row {row}: the output is not the sum of the ranks' partial rows in the fixed order")
            break
    cell.check(o.tail_rows_kept, f.rows - o.rows, f"{where}: output rows past {o.rows} were written")


def sanity(sheet: Sheet, o: Observation, f: OutputFacts, where: str) -> None:
    """O6: finite, not all zero, every row overwritten."""
    if not o.rows:
        return
    cell = sheet.cell("O6")
    output, before = (o.copies[name].reshape(f.rows, -1)[: o.rows] for name in ("output", "output_before"))
    zero = True
    for row in range(o.rows):
        values = torch.from_numpy(output[row].copy()).view(TORCH_DTYPES[f.activation])
        finite, same = bool(torch.isfinite(values).all()), bool((output[row] == before[row]).all())
        text = f"{where} row {row}: " + ("not finite" if not finite else "left as it was before the replay")
        cell.check(finite and not same, 1, text, output[row].nbytes)
        zero = zero and not bool(values.any())
    if zero:
        cell.fail(0, f"{where}: every output is zero")
