"""The kernels against the oracle: the declared arithmetic is the one that runs. Scores bit for bit, contexts within the bound."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from palimpsest.core.geometry import LATENT_FORMATS, Formats  # noqa: E402
from palimpsest.kernels.call import Call, Chunk, Scratch  # noqa: E402
from palimpsest.kernels.table import contract, implementation  # noqa: E402
from palimpsest.prove.cases import cases, profile  # noqa: E402
from palimpsest.prove.data import Data  # noqa: E402
from palimpsest.prove.exact import IndexRow  # noqa: E402
from palimpsest.prove.oracle import (  # noqa: E402
    LatentFormat,
    attend,
    audit_selection,
    canonical_selection,
    check_context,
    deployed_fp32,
    stream_scores,
)
from palimpsest.prove.ties import structure_faults, validity_faults  # noqa: E402

ENGINES = ("portable", "reference")
TOPK = 128


def run(engine, op, params, views, chunk, tap):
    scratch = Scratch(torch.empty(contract(op).scratch(**params) + 64, dtype=torch.uint8))
    implementation(op, engine)(Call(op, params, views, {}, scratch, SimpleNamespace(rank=0, size=1), tap), chunk)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["C02", "C03", "C05", "C06"])
@pytest.mark.parametrize("format", ["fp8", "fp32"])
def test_selection(make_geometry, engine, case, format):
    chosen = {c.id: c for c in cases(profile("small"), TOPK)}[case]
    step, formats = chosen.steps[0], Formats(index=format)
    data = Data(4, make_geometry(), formats, chosen)
    rows = min(6, step.rows)
    values, scales = data.index_records(0, step.history + rows)
    query, weights = data.queries(step, 0, rows)
    kind = torch.float8_e4m3fn if format == "fp8" else torch.float32
    keys = {"keys": torch.from_numpy(values).view(kind)}
    if scales is not None:
        keys["scales"] = torch.from_numpy(scales)
    ids, counts = torch.full((rows, TOPK), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32)
    nans = counts.clone()
    views = {
        "index_history": keys,
        "index_query": {"index_query": torch.from_numpy(query).view(kind)},
        "head_weights": {"head_weights": torch.from_numpy(weights)},
        "local_ids": {"local_ids": ids},
        "local_counts": {"counts": counts, "nans": nans},
    }
    ranked = {}

    def tap(event, **seen):
        if event == "scores":
            ranked.setdefault(seen["row"], []).append(seen["scores"].copy())

    params = {"topk": TOPK, "heads": 4, "dim": 128, "format": format, "ranks": 1}
    run(engine, "index_select", params, views, Chunk(step.history, rows), tap)
    assert not structure_faults(ids.numpy(), counts.numpy(), history=step.history, rows=rows, topk=TOPK)
    index = [IndexRow.from_bytes(q, w, format) for q, w in zip(query, weights, strict=True)]
    visible = [step.history + r + 1 for r in range(rows)]
    for row, scores in enumerate(stream_scores(data.read_index, index, visible)):
        mine, theirs = ids[row, : counts[row]].numpy(), np.concatenate(ranked[row])
        found = audit_selection(data.read_index, index[row], mine, topk=TOPK, scores=scores, deployed=theirs)
        assert found.ok
        assert not validity_faults(mine, theirs, TOPK)
        if format == "fp8":
            assert np.array_equal(deployed_fp32(scores, format).view(np.uint32), theirs.view(np.uint32))
            assert np.array_equal(mine, canonical_selection(theirs, TOPK))
            assert (found.score_bits, found.canonical_missing) == (0, 0)


@pytest.mark.parametrize("latent", LATENT_FORMATS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_attention(make_geometry, engine, latent, scale):
    chosen = cases(profile("small"), TOPK)[1]
    data = Data(4, make_geometry(latent_scale=scale), Formats(latent=latent), chosen)
    rng = np.random.default_rng(0)
    history = data.latent_records(0, 1500)
    ids = np.full((3, TOPK), -1, np.int32)
    counts = np.array([TOPK, 100, 1], np.int32)
    for row, count in enumerate(counts):
        ids[row, :count] = np.sort(rng.permutation(1500)[:count])
    query = rng.standard_normal((3, 4, 576), np.float32)
    context = torch.empty(3, 4, 512)
    views = {
        "ids": {"ids": torch.from_numpy(ids)},
        "counts": {"counts": torch.from_numpy(counts)},
        "latent_history": {"latent_history": torch.from_numpy(history)},
        "query": {"query": torch.from_numpy(query)},
        "context": {"context": context},
    }
    layout = LatentFormat(latent, 512, 64, scale)
    params = {
        "topk": TOPK, "heads": 4, "kv_lora": 512, "rope_dims": 64, "format": latent, "latent_scale": scale, "softmax_scale": 0.07
    }  # fmt: skip
    run(engine, "sparse_attend", params, views, Chunk(1497, 3), lambda *a, **k: None)
    for row, count in enumerate(counts):
        truth = attend(
            data.read_latent(ids[row, :count].astype(np.int64)), query[row].astype(np.float64), layout, softmax_scale=0.07
        )
        found = check_context(context[row].numpy(), truth)
        assert found.faults == 0, found
        assert found.worst <= 1
