"""Gates O3 and O5 of one replay: the attention output lies in the enclosure of oracle B, and what both oracles would betray is
counted.

Each rank takes the audited rows of its own slice, with all of its local heads, in the aliased arrangement.
"""

import numpy as np

from palimpsest.prove.capture import Observation
from palimpsest.prove.data import generator
from palimpsest.prove.enclosure import check_inside, enclose, follows, power
from palimpsest.prove.exact import decode_activation
from palimpsest.prove.gates import Sheet
from palimpsest.prove.gates_output import OutputFacts
from palimpsest.prove.oracle import attend

#: substitutions tried for each audited row
SUBSTITUTIONS = 8


def empty_power() -> dict[str, int]:
    """Counts of O5: substitutions tried, betrayed by O2, by O3; coordinates enclosed, of these with one possible bf16 value."""
    return {"tried": 0, "O2": 0, "O3": 0, "coordinates": 0, "unique": 0}


def oracle_b(sheet: Sheet, o: Observation, f: OutputFacts, rows: tuple[int, ...], *, seed: int, where: str) -> dict[str, int]:
    """O3 and O5 over audited chunk rows; returns their counts."""
    found = empty_power()
    ids, counts = o.array("ids", np.int32, f.rows, f.topk), o.array("counts", np.int32, f.rows)
    for row in rows:
        mine = ids[row, : max(0, int(counts[row]))]
        features = f.heads * f.layout.kv_lora
        if "O5" not in sheet.cells:  # a foreign attention's order is unknown: no enclosure, no power
            continue
        if not len(mine) or (mine < 0).any() or (mine >= o.visible).any():
            if follows(f.model):
                sheet.cell("O3").fail(features, f"{where} row {row}: the emitted ids cannot be looked up, see K1")
            sheet.cell("O5").fail(1, f"{where} row {row}: the emitted ids cannot be looked up, see K1")
            continue
        for name, value in _row(sheet, o, f, row, mine, seed, where).items():
            found[name] += value
    return found


def _row(sheet: Sheet, o: Observation, f: OutputFacts, row: int, ids: np.ndarray, seed: int, where: str) -> dict[str, int]:
    records = o.records(ids)
    query = decode_activation(o.copies["query"][row].reshape(f.heads, -1), f.activation)
    context = o.copies["context"][row].view("<f4").reshape(f.heads, f.layout.kv_lora)
    enclosure = enclose(records, query, f.layout, softmax_scale=f.softmax_scale, model=f.model)
    inside = check_inside(context, enclosure)
    text = f"{where} row {row}: {inside.faults} of {inside.checked} coordinates outside the enclosure, first {inside.first}"
    if follows(f.model):  # an enclosure that is the whole line would pass anything
        sheet.cell("O3").check(not inside.faults, inside.checked, text, records.nbytes)
    rest = np.setdiff1d(np.arange(o.visible), ids)
    rng = generator(seed, "substitutions", row, len(ids))
    others = rest[rng.integers(0, len(rest), SUBSTITUTIONS)] if len(rest) else rest
    counts = {"tried": 0, "O2": 0, "O3": 0}
    if len(others):
        truth = attend(records, query, f.layout, softmax_scale=f.softmax_scale, arithmetic=f.model)
        places = rng.integers(0, len(ids), len(others))
        counts = power(truth, enclosure, query, o.records(others), f.layout, scale=f.softmax_scale, places=places)
    sheet.cell("O5").passed(1)
    return {**counts, "coordinates": inside.checked, "unique": enclosure.unique}
