"""Attention sublayers of generated DeepSeek-V3.2 and GLM checkpoints, ours beside transformers': same sets, outputs within bound.

Both run in fp32 with unquantised records, so the only differences are roundings; ``bounded_layer`` derives how large those can be
on either road. The inputs of every layer are the normed hidden rows that transformers itself computed, so an error cannot hide in
an earlier layer. Contexts lie below, at and above top-k; ours runs in one shot and in ragged chunks, on one rank and on two.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from bounded_layer import BoundedLayer

from palimpsest import recipes
from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.checkpoint.load import read_tensor
from palimpsest.checkpoint.make import make
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Limits
from palimpsest.plan.place import place
from palimpsest.ranks.local import run_local
from palimpsest.run.execute import prepare
from palimpsest.run.weights import from_checkpoint

pytestmark = pytest.mark.peer
TOPK, PAGE = 32, 16
EXACT = Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32")
#: 32 index heads: an exactly zero score, and so a tie that no bound could settle, needs all of them to reject a token
SIZES = {
    "topk": TOPK,
    "kv_lora": 32,
    "rope": 8,
    "nope": 8,
    "v": 16,
    "index_dim": 16,
    "index_heads": 32,
    "hidden": 32,
    "heads": 4,
    "q_lora": 16,
}


@pytest.fixture(scope="module", params=["tiny-dsv32", "tiny-glm"])
def peer(request, tmp_path_factory):
    """(checkpoint folder, geometry, transformers model in fp32)."""
    transformers = pytest.importorskip("transformers")
    folder = make(request.param, tmp_path_factory.mktemp("peer") / request.param, overrides=SIZES)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return folder, recipes.load_geometry(str(folder)), model


def theirs(model, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Per layer: the sublayer's input rows, its output rows and, where it ran an indexer, the selected ids."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in model.model.layers]
    handles = []
    for record, layer in zip(found, model.model.layers, strict=True):

        def keep(_module, _args, kwargs, output, record=record):
            record["hidden"], record["output"] = kwargs["hidden_states"][0].clone(), output[0][0].clone()

        handles.append(layer.self_attn.register_forward_hook(keep, with_kwargs=True))
        if getattr(layer.self_attn, "indexer", None) is not None:

            def keep_ids(_module, _args, ids, record=record):
                record["ids"] = ids[0].clone()

            handles.append(layer.self_attn.indexer.register_forward_hook(keep_ids))
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return found


def ours(
    folder: Path, g: Geometry, layer: int, hidden: torch.Tensor, chunks: list[int], ranks: int, selected
) -> dict[str, torch.Tensor]:
    """Output rows, ids and counts of one layer, chunk by chunk."""
    tokens = -(-max(len(hidden), TOPK) // PAGE) * PAGE
    limits = Limits(tokens, max(chunks), ranks, PAGE)
    program = recipes.program(g, limits, EXACT, layer)
    plan = place(program)
    checkpoint = open_checkpoint(folder)
    fill = from_checkpoint(checkpoint, lambda r, n: recipes.weight_slices(g, layer, r, n), recipes.tables(g))

    def rank_main(comm):
        rows, ids, counts, start = [], [], [], 0
        with prepare(program, plan, comm=comm, fill=fill) as session:
            for size in chunks:
                extra = {} if selected is None else {k: v[start : start + size] for k, v in selected.items()}
                rows.append(session.prefill(hidden[start : start + size], start, copy=True, **extra))
                ids.append(session.arena.view("ids")[:size].clone())
                counts.append(session.arena.view("counts")[:size].clone())
                start += size
        return {"output": torch.cat(rows), "ids": torch.cat(ids), "counts": torch.cat(counts)}

    results = run_local(ranks, rank_main)
    for other in results[1:]:
        assert all(torch.equal(results[0][k], other[k]) for k in results[0])
    return results[0]


def numpy_weights(folder: Path, g: Geometry, layer: int) -> dict[str, np.ndarray]:
    names = {
        "q_a": "q_a_proj.weight",
        "q_a_norm": "q_a_layernorm.weight", "q_b": "q_b_proj.weight", "kv_a": "kv_a_proj_with_mqa.weight",
        "kv_a_norm": "kv_a_layernorm.weight", "kv_b": "kv_b_proj.weight", "o": "o_proj.weight",
    }  # fmt: skip
    if g.schedule[layer] == "full":
        names |= {"index_q": "indexer.wq_b.weight", "index_k": "indexer.wk.weight", "index_k_norm": "indexer.k_norm.weight",
                  "index_k_norm_bias": "indexer.k_norm.bias", "index_w": "indexer.weights_proj.weight"}  # fmt: skip
    checkpoint = open_checkpoint(folder)
    return {k: read_tensor(checkpoint, f"model.layers.{layer}.self_attn.{v}").double().numpy() for k, v in names.items()}


def mask_of(ids: torch.Tensor, counts: torch.Tensor, tokens: int) -> np.ndarray:
    mask = np.zeros((len(ids), tokens), dtype=bool)
    for row, (chosen, count) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True)):
        mask[row, chosen[:count]] = True
    return mask


def chunkings(tokens: int) -> list[tuple[list[int], int]]:
    ragged = [size for size in (7, 16, 1, tokens) if size <= tokens]
    cut, left = [], tokens
    for size in ragged:
        take = min(size, left)
        cut += [take] if take else []
        left -= take
    return [([tokens], 1), (cut, 2)]


@pytest.mark.parametrize("tokens", [TOPK - 9, TOPK, TOPK + 1, 3 * TOPK + 5])
def test_layers_agree_with_transformers(peer, tokens: int) -> None:
    folder, g, model = peer
    inv_freq = np.array(recipes.tables(g)["inv_freq"])
    records = theirs(model, tokens)
    kept: dict[str, torch.Tensor] = {}
    assert set(g.schedule) <= {"full", "shared"}
    for layer, record in enumerate(records):
        bounded = BoundedLayer(g, numpy_weights(folder, g, layer), record["hidden"].numpy(), inv_freq)
        runs = []
        for chunks, ranks in chunkings(tokens):
            selected = kept if g.schedule[layer] == "shared" else None
            runs.append(ours(folder, g, layer, record["hidden"], chunks, ranks, selected))
        assert torch.equal(runs[0]["output"], runs[1]["output"]), "one shot on one rank and ragged chunks on two differ in bytes"
        assert torch.equal(runs[0]["ids"], runs[1]["ids"])
        kept = {"ids": runs[0]["ids"], "counts": runs[0]["counts"]}
        mask = mask_of(kept["ids"], kept["counts"], tokens)
        assert mask.sum(-1).tolist() == [min(TOPK, row + 1) for row in range(tokens)]
        if "ids" in record:
            for row, chosen in enumerate(record["ids"].tolist()):  # rows with fewer visible keys also carry future ids
                assert set(np.flatnonzero(mask[row])) == {i for i in chosen if i <= row}, f"layer {layer} row {row}"
        for output, road in ((record["output"], "expanded"), (runs[0]["output"], "absorbed")):
            exact = bounded.output(mask, road)
            wrong = np.abs(output.double().numpy() - exact.value)
            worst = np.max(wrong / exact.bound)
            assert worst <= 1, f"layer {layer}, {road}: {worst} of the bound"
            assert np.median(exact.bound / np.abs(exact.value)) < 1, "a bound larger than the values shows nothing"
    assert "ids" in records[0]


def test_the_bound_sees_one_wrong_token(peer) -> None:
    """The same comparison with one id of one row replaced must leave the bound."""
    folder, g, model = peer
    tokens = 3 * TOPK
    record = theirs(model, tokens)[0]
    run = ours(folder, g, 0, record["hidden"], [tokens], 1, None)
    mask = mask_of(run["ids"], run["counts"], tokens)
    row = tokens - 1
    out, into = np.flatnonzero(mask[row])[0], np.flatnonzero(~mask[row])[0]
    mask[row, out], mask[row, into] = False, True
    exact = BoundedLayer(
        g, numpy_weights(folder, g, 0), record["hidden"].numpy(), np.array(recipes.tables(g)["inv_freq"])
    ).output(mask, "expanded")
    assert np.any(np.abs(record["output"].double().numpy() - exact.value)[row] > exact.bound[row])
