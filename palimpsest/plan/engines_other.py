"""SGLang 0.5.23, TensorRT-LLM, lmdeploy 0.18.0 and llama.cpp: what a DSA prefill takes in each, by their own formulas."""

from palimpsest.plan.engines_cell import MIB, Ask, Cell, EngineBill, unknown

SGLANG, TENSORRT, LMDEPLOY, LLAMA = "0.5.23", "source of Sep 2026", "0.18.0", "b12180"
#: rows x context below which SGLang does not bound its logits at all
SGLANG_UNBOUNDED = 8_000_000
#: elements (not bytes) of TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET, and the rows above which each rank scores its own slice
TENSORRT_ELEMENTS = 1 << 31
TENSORRT_SPLIT = 8_192
#: MiB of LMDEPLOY_DSA_INDEXER_MAX_LOGITS_MB
LMDEPLOY_MIB = 512

_DSA = "layers/attention/dsa"
_TRT = "tensorrt_llm/_torch/attention_backend/sparse/dsa"


def sglang_budget(device: int, free: int, static_percent: int) -> int:
    """Bytes of logits: a fifth of what is free now, a fifth of what is not static, three tenths of the device, the least."""
    return max(1, min(free // 5, device * (100 - static_percent) // 500, device * 3 // 10))


def sglang_rows(a: Ask, budget: int) -> int:
    """Rows of one scored tile under a budget in bytes."""
    return min(a.T, max(1, budget // (4 * a.N)))


def sglang(a: Ask) -> EngineBill:
    """Every slot of one rank; all are fresh tensors of the caching allocator."""
    cells = (
        Cell("index gather", a.N * (a.I + 4), "hidden", "N*(I + 4)", a.pick("N I"), f"{_DSA}: get_index_k_scale_buffer",
             "a fresh tensor per layer"),
        Cell("latent gather", a.N * a.D * 2, "hidden", "N*D*2", a.pick("N D"),
             "layers/attention/dsa_backend.py; dequantize_k_cache_paged_dsa", "the fp8 prefill's dequantised bf16 copy"),
        _sglang_logits(a),
        Cell("ids", a.T * a.K * 4, "hidden", "T*K*4", a.pick("T K"), f"{_DSA}/dsa_indexer.py", "filled with -1"),
        unknown("exchange", "no buffer of its own in the files read (SGLANG_DSA_TOPK_BROADCAST is off)",
                f"{_DSA}/dsa_indexer.py"),
        unknown("total", "no slot is planned: the reserve is 1.5 x chunked_prefill_size + 2 x max_bs, whatever the context",
                "arg_groups/memory_hook.py"),
    )  # fmt: skip
    return EngineBill("SGLang", SGLANG, "none: each is a tensor of its own", cells)


def _sglang_logits(a: Ask) -> Cell:
    source, known = "layers/attention/mqa_logits_utils.py; dsa/dsa_indexer.py", a.deployment
    if a.T * a.N < SGLANG_UNBOUNDED:
        return Cell("logits", a.T * a.N * 4, "hidden", "T*N*4", a.pick("T N"), source, "below 8,000,000 scores: not bounded")
    if known.device_bytes is None or known.free_bytes is None:
        why = (
            "the budget is a fifth of the memory that is free when the first prefill runs; give both to compute it. "
            f"Unbounded, {a.T:,} rows would take {a.T * a.N * 4 // MIB:,} MiB"
        )
        return unknown("logits", why, source)
    budget = sglang_budget(known.device_bytes, known.free_bytes, known.static_percent)
    symbols = (*a.pick("T N"), ("free", known.free_bytes), ("device", known.device_bytes), ("static", known.static_percent))
    return Cell(
        "logits", sglang_rows(a, budget) * 4 * a.N, "hidden",
        "min(T, max(1, b // (4*N)))*4*N where b = max(1, min(free // 5, device*(100 - static) // 500, device*3 // 10))",
        symbols, source, f"{sglang_rows(a, budget):,} rows of a budget of {budget / MIB:,.1f} MiB; about twice that while two "
        "tiles are alive; the first value is kept for the process, so two starts can tile differently",
    )  # fmt: skip


def tensorrt_chunk(context: int) -> int:
    """Rows of one indexer chunk, ``indexer_max_chunk_size`` and what long contexts make of it."""
    return 32_768 if context <= 1 << 18 else 16_384 if context <= 1 << 19 else 8_192


def tensorrt_rows(a: Ask) -> int:
    """Rows of one scored tile: the chunk, this rank's slice of it above the threshold, and what the element budget allows."""
    rows = min(a.T, tensorrt_chunk(a.N))
    local = -(-rows // a.W) if rows > TENSORRT_SPLIT else rows
    return max(1, min(local, TENSORRT_ELEMENTS // a.N))


def tensorrt(a: Ask) -> EngineBill:
    """Every slot of one rank."""
    rows = min(a.T, tensorrt_chunk(a.N))
    local = -(-rows // a.W) if rows > TENSORRT_SPLIT else rows
    cells = (
        Cell("index gather", a.N * (a.I + 4), "hidden", "N*(I + 4)", a.pick("N I"), f"{_TRT}/indexer.py", "per chunk"),
        unknown("latent gather", "no gathered copy of the latents in the files read", f"{_TRT}/metadata.py"),
        Cell("logits", tensorrt_rows(a) * a.N * 4, "hidden", "max(1, min(r, B // N))*N*4",
             (("r", local), ("B", TENSORRT_ELEMENTS), *a.pick("N")), f"{_TRT}/indexer.py; {_TRT}/params.py",
             "B = TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET counts elements: 2^31 are 8 GiB; r: rows of this rank in one chunk of "
             f"{tensorrt_chunk(a.N):,}"),
        Cell("ids", a.T * a.K * 4, "hidden", "T*K*4", a.pick("T K"), f"{_TRT}/indexer.py",
             "a planned buffer only under graph capture"),
        unknown("exchange", f"ids are gathered from all ranks above {TENSORRT_SPLIT:,} rows, into allocator tensors",
                f"{_TRT}/indexer.py"),
        unknown("total", "no slot is planned outside graph capture", f"{_TRT}/metadata.py"),
    )  # fmt: skip
    return EngineBill("TensorRT-LLM", TENSORRT, "none", cells)


def lmdeploy_reserve(a: Ask, vocab: int) -> int:
    """Bytes it keeps from the caches: logits of the vocabulary, and the index score budget."""
    return (a.T + 2 * a.deployment.batches) * vocab * 2 + LMDEPLOY_MIB * MIB


def lmdeploy_rows(a: Ask) -> int:
    """Rows of one scored tile."""
    return max(1, LMDEPLOY_MIB * MIB // (a.N * 4))


def lmdeploy(a: Ask) -> EngineBill:
    """Every slot of one rank."""
    vocab, nsa, base = a.deployment.vocab, "backends/cuda/nsa.py", "engine/executor/base.py"
    total = (
        unknown("total", "the reserve needs the vocabulary size: (T + 2*batches)*vocab*2 + 512 MiB", base)
        if vocab is None
        else Cell("total", lmdeploy_reserve(a, vocab), "named", "(T + 2*B)*vocab*2 + M*MiB",
                  (*a.pick("T"), ("B", a.deployment.batches), ("vocab", vocab), ("M", LMDEPLOY_MIB)), base,
                  f"not in the reserve: both flattened histories, {a.N * (a.I + 4 + 2 * a.D) // MIB:,} MiB; T is halved until 16 "
                  "cache blocks fit")
    )  # fmt: skip
    cells = (
        Cell("index gather", a.N * (a.I + 4), "hidden", "N*(I + 4)", a.pick("N I"), nsa, "flattened; not in the reserve"),
        Cell("latent gather", a.N * a.D * 2, "hidden", "N*D*2", a.pick("N D"), nsa, "flattened bf16; not in the reserve"),
        Cell("logits", LMDEPLOY_MIB * MIB, "named", "M*MiB", (("M", LMDEPLOY_MIB),), f"{base}; {nsa}",
             f"M = LMDEPLOY_DSA_INDEXER_MAX_LOGITS_MB, reserved; tiles of {lmdeploy_rows(a):,} rows"),
        Cell("ids", a.T * a.K * 4, "hidden", "T*K*4", a.pick("T K"), nsa),
        unknown("exchange", "no buffer of its own in the files read", nsa),
        total,
    )  # fmt: skip
    return EngineBill("lmdeploy", LMDEPLOY, "none", cells)


def llama_logits(a: Ask, *, fused: bool) -> int:
    """Bytes of the indexer's scores in the worst-case graph."""
    return a.N * a.deployment.ubatch * 4 * (1 if fused else a.H)


def llama(a: Ask) -> EngineBill:
    """Every slot; the graph for (n_ctx, n_ubatch) is reserved at start, and its buffer sizes are printed there."""
    source, batch = "ggml graph allocator, GGML_OP_LIGHTNING_INDEXER", (("u", a.deployment.ubatch),)
    cells = (
        Cell("index gather", 0, "named", "0", (), source, "read where it lies in the cache"),
        Cell("latent gather", 0, "named", "0", (), source, "read where it lies in the cache"),
        Cell("logits", llama_logits(a, fused=True), "named", "N*u*4", (*a.pick("N"), *batch), source,
             "u = n_ubatch; the selection is a mask over the whole cache: attention off the sparse path still pays full width"),
        unknown("ids", "small, inside the compute buffer", source),
        unknown("exchange", "no tensor-parallel exchange of ids", source),
        unknown("total", "one compute buffer per backend, decided by the graph allocator and printed at start", source),
        Cell("logits, unfused indexer", llama_logits(a, fused=False), "named", "N*u*4*H", (*a.pick("N H"), *batch), source,
             "when the fused operation is not available on a backend"),
    )  # fmt: skip
    return EngineBill("llama.cpp", LLAMA, "by the order of the graph, found by its allocator", cells)
