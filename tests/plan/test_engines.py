"""The comparison with other engines: every number checked by hand in the design is a test, and every formula is evaluated."""

import ast
import dataclasses
import operator

import pytest

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import Formats, index_record_bytes, latent_record_bytes
from palimpsest.core.spec import Limits
from palimpsest.plan import engines, engines_other, engines_vllm
from palimpsest.plan.engines_cell import MIB, SLOTS, Ask, Cell, Deployment, EngineBill, ask
from palimpsest.plan.engines_vllm import PrefillTile, prefill_tiles
from palimpsest.plan.place import place
from palimpsest.recipes import default_formats, load_geometry, program

K = 1 << 10
M = 1 << 20
GIB = 1 << 30


def v32(tokens: int, rows: int = 8192, heads: int = 16, ranks: int = 8, **known) -> Ask:
    return Ask(L=tokens, N=tokens, T=rows, h=heads, W=ranks, K=2048, deployment=Deployment(**known))


@pytest.mark.parametrize(
    ("tokens", "gather", "attention"),
    [(131_072, 661, 2080), (163_840, 826, 2260), (262_144, 1321, 2800), (524_288, 1057, 2512), (1_048_576, 2113, 3664)],
)
def test_vllm_workspaces(tokens: int, gather: int, attention: int) -> None:
    a, f = v32(tokens), engines_vllm.factor(tokens)
    assert engines_vllm.index_gather(a, engines_vllm.gather_rows(a, f)) == gather * MIB
    assert engines_vllm.latent_prefill(a, f) == attention * MIB
    assert engines_vllm.bill(a).cell("total").nbytes == (max(gather, attention) + 512 + 64 + 128) * MIB


def test_vllm_at_one_rank_and_in_its_earlier_source() -> None:
    assert engines_vllm.latent_prefill(v32(M, heads=128, ranks=1), 2) == 6656 * MIB
    a = v32(M)
    assert engines_vllm.index_gather(a, engines_vllm.gather_rows(a, 5)) == 5281 * MIB
    assert engines_vllm.latent_prefill(a, 5, padded=False) == 5904 * MIB


def test_vllm_logged_workspace_to_the_byte() -> None:
    """A public GLM-5.3 log says 5036.40 MB: one million tokens of context at f = 5."""
    a = v32(1_000_000)
    found = engines_vllm.index_gather(a, engines_vllm.gather_rows(a, 5))
    assert found == 40_000_000 * 132 + MIB
    assert f"{found / MIB:.2f}" == "5036.40"


def test_vllm_pools_divide_the_rows() -> None:
    a = v32(M)
    assert engines_vllm.gather_rows(a, 2, divide=4) == 4 * M
    assert engines_vllm.index_gather(a, 1000, record="mxfp4") == 64_000 + 4_096 + MIB


def test_vllm_chunker_golden() -> None:
    assert prefill_tiles([64, 20, 20], [16, 4, 4], 2560, 512) == [
        PrefillTile(0, 1, 0, 8, True), PrefillTile(0, 1, 8, 16, False), PrefillTile(1, 3, 0, 8, True)
    ]  # fmt: skip


def test_vllm_chunker_covers_every_row_once_within_its_budget() -> None:
    import random

    draw = random.Random(7)
    for _ in range(300):
        rows = [draw.randint(1, 40) for _ in range(draw.randint(1, 8))]
        contexts = [r + draw.randint(0, 200) for r in rows]
        gather, elements = draw.randint(1, 600), draw.randint(1, 4000)
        tiles = prefill_tiles(contexts, rows, gather, elements)
        covered = [(t.start, t.stop, r) for t in tiles for r in range(t.row_start, t.row_stop)]
        packs = list(dict.fromkeys((t.start, t.stop) for t in tiles))
        assert [p for pair in packs for p in range(*pair)] == list(range(len(rows)))
        assert covered == [(*pair, r) for pair in packs for r in range(sum(rows[slice(*pair)]))]
        for t in tiles:
            keys = sum(contexts[t.start : t.stop])
            assert keys * (t.row_stop - t.row_start) <= elements or t.row_stop - t.row_start == 1
            assert keys <= gather or t.stop == t.start + 1
            assert t.gathers == (t.row_start == 0)


def test_vllm_chunker_refuses_what_is_no_step() -> None:
    with pytest.raises(BadConfig, match="1 <= rows <= context"):
        prefill_tiles([4], [5], 10, 10)
    with pytest.raises(BadConfig, match="2 contexts and 1 row"):
        prefill_tiles([4, 4], [1], 10, 10)


def test_one_million_tokens_fit_128_rows_in_the_logits_budget() -> None:
    (first, *_) = prefill_tiles([M], [8192], 16 * M, 512 * MIB // 4)
    assert first.row_stop == 128


@pytest.mark.parametrize(("tokens", "rows", "gather", "latent", "unbounded"),
                         [(128 * K, 2457, 16.5, 144, 4), (512 * K, 614, 66, 576, 16), (M, 307, 132, 1152, 32)])  # fmt: skip
def test_sglang(tokens: int, rows: int, gather: float, latent: int, unbounded: int) -> None:
    a = v32(tokens, device_bytes=80 * GIB, free_bytes=6 * GIB)
    budget = engines_other.sglang_budget(80 * GIB, 6 * GIB, 88)
    assert f"{budget / MIB:.1f}" == "1228.8"
    assert engines_other.sglang_rows(a, budget) == rows
    bill = engines_other.sglang(a)
    assert bill.cell("index gather").nbytes == gather * MIB
    assert bill.cell("latent gather").nbytes == latent * MIB
    assert bill.cell("logits").nbytes == rows * 4 * tokens
    blind = engines_other.sglang(v32(tokens)).cell("logits")
    assert blind.kind == "not computable"
    assert f"{unbounded * 1024:,} MiB" in blind.note
    assert engines_other.sglang(v32(2048, rows=1024)).cell("logits").nbytes == 8 * MIB


@pytest.mark.parametrize(("tokens", "rows", "gib"), [(128 * K, 8192, 4), (512 * K, 8192, 8), (M, 8192, 8), (128 * K, 32768, 8)])
def test_tensorrt(tokens: int, rows: int, gib: int) -> None:
    assert engines_other.tensorrt(v32(tokens, rows=rows, ranks=1)).cell("logits").nbytes == gib * GIB


def test_tensorrt_ranks_score_their_slice_above_the_threshold() -> None:
    assert engines_other.tensorrt_rows(v32(128 * K, rows=32768, ranks=8)) == 4096
    assert engines_other.tensorrt_rows(v32(128 * K, rows=8192, ranks=8)) == 8192


@pytest.mark.parametrize(("tokens", "rows", "unreserved"), [(128 * K, 1024, 160), (512 * K, 256, 642), (M, 128, 1284)])
def test_lmdeploy(tokens: int, rows: int, unreserved: int) -> None:
    a = v32(tokens, vocab=129_280)
    assert engines_other.lmdeploy_reserve(a, 129_280) // MIB == 2595
    assert engines_other.lmdeploy_rows(a) == rows
    bill = engines_other.lmdeploy(a)
    assert (bill.cell("index gather").nbytes + bill.cell("latent gather").nbytes) // MIB == unreserved
    assert f"{unreserved:,} MiB" in bill.cell("total").note
    assert engines_other.lmdeploy(v32(tokens)).cell("total").kind == "not computable"


def test_llama() -> None:
    a = dataclasses.replace(v32(M), H=32)
    assert engines_other.llama_logits(a, fused=False) == 64 * GIB
    assert engines_other.llama_logits(a, fused=True) == 2 * GIB
    assert engines_other.llama_logits(v32(128 * K), fused=True) == 256 * MIB


def bills(model: str = "deepseek-v3.2", reuse: str = "on", **known) -> tuple[EngineBill, ...]:
    geometry, limits = load_geometry(model), Limits(M, 8192, 8)
    made = program(geometry, limits, default_formats(geometry).replace(latent="fp8"), geometry.full_layers[0])
    return engines.compare_rows(geometry, limits, made, place(made, reuse), Deployment(**known))


def test_the_printed_row_of_each_engine() -> None:
    """The template of the design: 1M tokens, 8,192 rows, DeepSeek-V3.2 geometry, one of 8 ranks, in MiB."""
    found = {
        b.engine: [None if b.cell(s).nbytes is None else b.cell(s).nbytes // MIB for s in SLOTS]
        for b in bills(vocab=129_280, device_bytes=80 * GIB, free_bytes=6 * GIB)
    }
    assert found["vLLM"] == [2113, 3664, 512, 64, 128, 4368]
    assert found["SGLang"] == [132, 1152, 1228, 64, None, None]
    assert found["TensorRT-LLM"] == [132, None, 8192, 64, None, None]
    assert found["lmdeploy"] == [132, 1152, 512, 64, None, 2595]
    assert found["llama.cpp"] == [0, 0, 2048, None, None, None]
    assert found["ours"][:2] == [132, 576]
    assert found["ours"][-1] < 768


def test_ours_counts_shared_bytes_once_and_apart_when_reuse_is_off() -> None:
    on, off = bills()[-1].cell("total").nbytes, bills(reuse="off")[-1].cell("total").nbytes
    assert off - on == 132 * MIB


def test_a_shared_layer_has_no_index_slots() -> None:
    geometry, limits = load_geometry("glm-5.2"), Limits(64 * K, 4096, 8)
    made = program(geometry, limits, default_formats(geometry), 3)
    mine = engines.ours(made, place(made))
    assert mine.cell("index gather").kind == mine.cell("logits").kind == "not computable"
    assert mine.cell("total").nbytes > mine.cell("latent gather").nbytes == 64 * K * 656


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
FUNCTIONS = {"r256": lambda x: -(-x // 256) * 256, "min": min, "max": max}


def evaluate(node: ast.expr, values: dict[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](evaluate(node.left, values), evaluate(node.right, values))
    if isinstance(node, ast.Call):
        return FUNCTIONS[node.func.id](*[evaluate(a, values) for a in node.args])
    return values[node.id] if isinstance(node, ast.Name) else node.value


def formula_value(cell: Cell) -> int:
    text, _, where = cell.formula.partition(" where ")
    values = {name.replace(".", "_"): value for name, value in cell.symbols} | {"MiB": MIB}
    if where:
        name, _, part = where.partition(" = ")
        values[name] = evaluate(ast.parse(part, mode="eval").body, values)
    return evaluate(ast.parse(text.replace(".scratch", "_scratch"), mode="eval").body, values)


def wrong(found: tuple[EngineBill, ...]) -> list[str]:
    return [f"{b.engine} {c.slot}" for b in found for c in b.cells if c.nbytes is not None and formula_value(c) != c.nbytes]


@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5.2", "kimi-k3.1-pro"])
@pytest.mark.parametrize("reuse", ["on", "off"])
def test_every_formula_gives_its_number_and_every_cell_its_source(model: str, reuse: str) -> None:
    found = bills(model, reuse, vocab=129_280, device_bytes=96 * GIB, free_bytes=9 * GIB)
    assert wrong(found) == []
    assert all(c.source for b in found for c in b.cells)
    assert sum(c.nbytes is not None for b in found for c in b.cells) >= 25
    assert {s for b in found for s in SLOTS} <= {c.slot for c in found[0].cells}


def test_a_wrong_formula_is_found() -> None:
    bill = bills()[0]
    cell = dataclasses.replace(bill.cell("ids"), formula="T*K*2")
    assert wrong((dataclasses.replace(bill, cells=(cell,)),)) == ["vLLM ids"]


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(Unsupported, match="3 ranks do not divide the 128 heads"):
        ask(load_geometry("deepseek-v3.2"), Limits(64 * K, 3, 3))


def test_impossible_deployments_are_refused() -> None:
    for values, words in (({"batches": 0}, "batches is 0"), ({"static_percent": 101}, "at most 100"),
                          ({"device_bytes": 1, "free_bytes": 2}, "exceeds the device")):  # fmt: skip
        with pytest.raises(BadConfig, match=words):
            Deployment(**values)


def test_our_records_are_the_public_ones_to_the_byte() -> None:
    public = {name: size for name, size, _, _ in engines.PUBLIC_RECORDS}
    geometry = load_geometry("deepseek-v3.2")
    assert index_record_bytes(geometry, Formats()) == public["index fp8"] == 132
    for latent, name in (("fp8_ds_mla", "latent fp8_ds_mla"), ("bf16", "latent bf16"), ("fp8", "latent fp8, one scale")):
        assert latent_record_bytes(geometry, Formats(latent=latent)) == public[name]
    for name, size, formula, source in engines.PUBLIC_RECORDS:
        assert evaluate(ast.parse(formula, mode="eval").body, {}) == size, name
        assert source


def test_the_smallest_histories() -> None:
    """Index dims 8, latent 16 + 4 in fp32, 64 tokens: 768 B and 5,120 B, and sharing saves 768 B."""
    base = load_geometry("kimi-k3.1-pro")
    indexer = dataclasses.replace(base.indexer, dim=8, topk=16)
    tiny = dataclasses.replace(base, kv_lora=16, rope=dataclasses.replace(base.rope, dims=4), indexer=indexer)
    made = program(tiny, Limits(64, 16, 1, 16), Formats(latent="fp32"), tiny.full_layers[0])
    on, off = place(made), place(made, "off")
    assert (on.by_name["index_history"].nbytes, on.by_name["latent_history"].nbytes) == (768, 5120)
    assert engines.ours(made, off).cell("total").nbytes - engines.ours(made, on).cell("total").nbytes == 768


def test_the_seed() -> None:
    geometry = load_geometry("kimi-k3.1-pro")
    made = program(geometry, Limits(M, 4096, 16), default_formats(geometry), geometry.full_layers[0])
    plan = place(made)
    early, late = plan.by_name["index_history"], plan.by_name["latent_history"]
    assert (early.nbytes, late.nbytes, early.nbytes + late.nbytes) == (132 * MIB, 576 * MIB, 708 * MIB)
    assert (early.offset, late.offset) == (0, 0)
