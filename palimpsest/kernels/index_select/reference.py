"""index_select, reference: all scores of a row at once, then a full sort by (score descending, id ascending).

fp8 records: dots are exact, so every score has the engine's bits. fp32 records: the fp64 dot may be summed in another order, so
scores can differ in the last bit where the exact value lies next to a rounding boundary."""

import numpy as np

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import Array, wide


def run(call: Call, chunk: Chunk) -> None:
    p, ids_out = call.params, call.view("local_ids")  # [slice, topk] i32
    start = min(call.comm.rank * ids_out.shape[0], chunk.rows)
    for row in range(start, min(start + ids_out.shape[0], chunk.rows)):
        slot, visible = row - start, chunk.history + row + 1
        scores = _scores(call, slot, visible)  # [visible] fp32
        call.tap("scores", row=row, start=0, scores=scores)
        lost = np.isnan(scores)
        ranked = np.where(lost, -np.inf, scores)
        best = np.lexsort((np.arange(visible), -ranked))[: p["topk"]]  # last key sorts first: score, then id
        ids_out[slot] = -1
        for place, token in enumerate(sorted(best.tolist())):
            ids_out[slot, place] = token
        call.view("local_counts", "counts")[slot] = len(best)
        call.view("local_counts", "nans")[slot] = int(lost.sum())
        call.tap("selected", rows=range(row, row + 1))


def _scores(call: Call, slot: int, visible: int) -> Array:
    keys = wide(call.view("index_history", "keys")[:visible])  # [visible, dim]
    query = wide(call.view("index_query")[slot])  # [heads, dim]
    weights = wide(call.view("head_weights")[slot])  # [heads]
    total = np.zeros(visible)
    with np.errstate(over="ignore", invalid="ignore"):
        for head in range(query.shape[0]):
            dot = keys @ query[head]  # [visible]
            total = total + weights[head] * np.where(dot < 0, 0.0, dot)  # NaN < 0 is false, so NaN stays
        if call.params["format"] == "fp8":
            total = total * wide(call.view("index_history", "scales")[:visible])
        return total.astype(np.float32) + np.float32(0.0)
