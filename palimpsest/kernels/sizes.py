"""Tile sizes that contracts and implementations share.

They are constants because they are part of the arithmetic: a row's bits may not depend on a size chosen at run time.
"""

#: query rows of one projection GEMM; shorter groups are padded, so that a row's bits never depend on how many rows came with it
ROW_TILE = 32
#: output columns of one projection GEMM over a weight without heads
COLUMN_TILE = 256
#: history tokens scored at once
KEY_TILE = 4096
#: query rows whose selection state is held at once
SELECT_ROWS = 16
#: attention heads of one attention GEMM; fewer are padded
HEAD_TILE = 8
#: selected records of one attention block, in emitted order
ID_BLOCK = 64
#: bytes of peer staging aimed at; collectives split their traffic into rounds of at most this much
STAGING_BYTES = 8 << 20


def linear_scratch(depth: int, columns: int, *, resident: bool = False, engine: str = "portable") -> int:
    """Scratch bytes of one tiled projection: fp32 input tile, weight tile (the whole weight when ``resident``) and output tile,
    64-aligned. With an AMX engine or avx512 also what its own projection needs: which one runs depends on the weight's dtype.
    """
    tile = min(columns, COLUMN_TILE)
    plain = 4 * (ROW_TILE * depth + depth * (columns if resident else tile) + ROW_TILE * tile) + 3 * 64
    if engine == "avx512":
        return max(plain, avx512_linear_scratch(depth, columns, resident=resident))
    return max(plain, amx_linear_scratch(depth, columns, resident=resident)) if engine in AMX_ENGINES else plain


def tile_scratch(*widths: int, itemsize: int = 4) -> int:
    """Scratch bytes of one tile of ``ROW_TILE`` rows per width, each 64-aligned."""
    return sum(itemsize * ROW_TILE * width + 64 for width in widths)


def norm_scratch(width: int) -> int:
    """Scratch bytes of ``norms.RowNorm``: two fp64 tiles, fp64 weight and bias, two fp64 columns."""
    return tile_scratch(width, width, 1, 1, itemsize=8) + 2 * (8 * width + 64)


def rotation_scratch(dims: int) -> int:
    """Scratch bytes of ``rope.Rotation``: five fp64 tiles of half the rotated dims."""
    return tile_scratch(*[dims // 2] * 5, itemsize=8)


def hadamard_scratch(dim: int) -> int:
    """Scratch bytes of ``hadamard.Hadamard``: one fp64 tile and half of one."""
    return tile_scratch(dim, dim // 2, itemsize=8)


def quantise_scratch(width: int, block: int) -> int:
    """Scratch bytes of ``fp8.Quantiser``: fp32 tile of magnitudes, e4m3 tile, fp32 scale and its exponent bits per block."""
    return tile_scratch(width, width, width // block, width // block)


def decode_scratch(elements: int) -> int:
    """Scratch bytes of ``fp8.Decoder`` for at most ``elements`` codes at once: fp64 and fp32 tables, their codes, int32
    indices.
    """
    return 256 * (1 + 8 + 4) + 4 * elements + 4 * 64


#: engines whose arithmetic is AMX's
AMX_ENGINES = ("amx", "amx-union")
#: engines that select with the avx engine's file
AVX_ENGINES = ("avx", "avx512")
#: tokens scored at once by the amx and avx engines; their bits do not depend on it
AMX_KEY_TILE = 1024
#: most query rows whose selection state the amx and avx engines hold at once, and the scratch they aim at with it
FAST_SELECT_ROWS = 64
FAST_SELECT_BYTES = 4 << 20


def amx_selects(format: str, dim: int) -> bool:
    """Whether the amx engine scores these index records itself; others are the portable engine's."""
    return format == "fp8" and dim <= 128


def amx_heads(heads: int) -> int:
    """Index heads of the amx engine: whole pairs of tiles."""
    return -(-heads // 32) * 32


def amx_dim(dim: int) -> int:
    """Index dims of the amx engine: two or four steps of 32."""
    return 64 if dim <= 64 else 128


def fast_capacity(topk: int) -> int:
    """Candidates one row holds: compacted when twice the top-k is reached, with room for the vector stores."""
    return 2 * max(topk, 256) + 64


def _amx_row(topk: int, heads: int, dim: int) -> int:
    return amx_heads(heads) * (2 * amx_dim(dim) + 4) + 8 * fast_capacity(topk) + 8 + 4 + 8


def _amx_select_shared(topk: int, dim: int) -> int:
    tile = AMX_KEY_TILE * (2 * amx_dim(dim) + 4 + 4 * SELECT_ROWS)
    return tile + 16 * amx_dim(dim) + 4 * (32 + 2048 + 16) + 16 * fast_capacity(topk) + 16 * 64


def amx_select_rows(topk: int, heads: int, dim: int) -> int:
    """Query rows of one group: as many as keep a thread's scratch within ``FAST_SELECT_BYTES``, at most ``FAST_SELECT_ROWS``, at
    least one.
    """
    room = FAST_SELECT_BYTES - _amx_select_shared(topk, dim)
    return max(1, min(FAST_SELECT_ROWS, room // _amx_row(topk, heads, dim)))


def amx_select_scratch(topk: int, heads: int, dim: int) -> int:
    """Scratch bytes of one thread of index_select, amx engine; a multiple of 64."""
    used = amx_select_rows(topk, heads, dim) * _amx_row(topk, heads, dim) + _amx_select_shared(topk, dim)
    return -(-used // 64) * 64


#: query rows of one unit of attention work, and neighbours whose records are joined by the amx-union engine
ATTEND_ROWS = 16
#: ids of one block of the amx engine's online softmax
AMX_ID_BLOCK = 128


def amx_attends(format: str, activation: str) -> bool:
    """Whether the amx engine attends these records and queries itself; others are the portable engine's."""
    return format in ("fp8", "fp8_ds_mla", "bf16") and activation == "bf16"


def amx_head_tiles(heads: int) -> int:
    """Tiles of 16 heads: one, or pairs."""
    return 1 if heads <= 16 else -(-heads // 32) * 2


def amx_attend_scratch(topk: int, heads: int, kv_lora: int, rope_dims: int) -> int:
    """Scratch bytes of one thread of sparse_attend, amx engine; a multiple of 64."""
    width, latent, lanes = -(-(kv_lora + rope_dims) // 64) * 64, -(-kv_lora // 64) * 64, 16 * amx_head_tiles(heads)
    block = AMX_ID_BLOCK * (2 * width + 2 * 64 + 4 * lanes) + 2 * lanes * AMX_ID_BLOCK
    used = 8 * topk + block + lanes * (2 * width + 4 * latent + 12) + 128 + 12 * 64
    return -(-used // 64) * 64


def avx512_octets(heads: int) -> int:
    """Vectors of 8 heads of the avx512 engine: one, or pairs."""
    return 1 if heads <= 8 else -(-heads // 16) * 2


def avx512_attend_scratch(topk: int, heads: int, kv_lora: int, rope_dims: int) -> int:
    """Scratch bytes of one thread of sparse_attend, avx512 engine; a multiple of 64."""
    dim, lanes = kv_lora + rope_dims, -(-heads // 16) * 16
    block = AMX_ID_BLOCK * (2 * (-(-dim // 64) * 64) + 4 * lanes + 2 * lanes)
    queries = (avx512_octets(heads) * 64 + 8) * -(-dim // 4)
    used = 8 * topk + block + queries + lanes * (4 * (-(-kv_lora // 64) * 64) + 12) + 128 + 9 * 64
    return -(-used // 64) * 64


def amx_query_scratch(q_lora: int, heads: int, dim: int) -> int:
    """Scratch bytes of index_query, amx engine: one projection of all heads, its tile, one record."""
    return amx_linear_scratch(q_lora, heads * dim) + tile_scratch(heads * dim) + 16 * dim + 4 * 64


def amx_linear_scratch(depth: int, columns: int, *, resident: bool = False) -> int:
    """Scratch bytes of ``amx_linear.AmxProjection``: input rows as fp32, as two bf16 parts, packed; a weight tail; sums; the
    weight when resident."""
    return ROW_TILE * depth * (4 + 4 + 4) + 64 * depth + 4096 + (2 * columns * depth if resident else 0) + 6 * 64


#: elements of the depth that one chain of the avx512 engine's projections adds, and weight rows whose sums it holds: whole
#: groups of 12 and of 16
DEPTH_BLOCK = 512
PROJECT_COLUMNS = 48


def avx512_linear_scratch(depth: int, columns: int, *, resident: bool = False) -> int:
    """Scratch bytes of ``avx512_linear.Avx512Projection``: a short tile's input rows; both bf16 parts of them, packed; sums; the
    weight when resident."""
    return ROW_TILE * (4 * depth + 4 * depth + 4 * PROJECT_COLUMNS) + (2 * columns * depth if resident else 0) + 4 * 64


def avx_heads(heads: int) -> int:
    """Index heads of the avx engine: whole fours."""
    return -(-heads // 4) * 4


def avx_dim(dim: int) -> int:
    """Index dims of the avx engine: whole fours."""
    return -(-dim // 4) * 4


def _avx_row(topk: int, heads: int, dim: int) -> int:
    return avx_heads(heads) * (4 * avx_dim(dim) + 4) + 8 * fast_capacity(topk) + 8 + 4 + 8


def _avx_select_shared(topk: int, dim: int) -> int:
    return (
        AMX_KEY_TILE * (4 * avx_dim(dim) + 4 + 4 * SELECT_ROWS)
        + 4 * (256 + 64 + 4 * 512 + 16)
        + 16 * fast_capacity(topk)
        + 16 * 64
    )


def avx_select_rows(topk: int, heads: int, dim: int) -> int:
    """Query rows of one group of the avx engine; see ``amx_select_rows``."""
    return max(1, min(FAST_SELECT_ROWS, (FAST_SELECT_BYTES - _avx_select_shared(topk, dim)) // _avx_row(topk, heads, dim)))


def avx_select_scratch(topk: int, heads: int, dim: int) -> int:
    """Scratch bytes of one thread of index_select, avx engine; a multiple of 64."""
    used = avx_select_rows(topk, heads, dim) * _avx_row(topk, heads, dim) + _avx_select_shared(topk, dim)
    return -(-used // 64) * 64


def amx_union_scratch(topk: int, heads: int, kv_lora: int, rope_dims: int) -> int:
    """Scratch bytes of one thread of sparse_attend, amx-union engine: the row's own, and that of a union of neighbours when
    heads allow one."""
    rows = amx_attend_scratch(topk, heads, kv_lora, rope_dims)
    if not union_heads(heads):
        return rows
    lanes, window = ATTEND_ROWS * union_heads(heads), UNION_WINDOW // 8
    tiles = amx_head_tiles(lanes)
    masks = UNION_IDS * 2 * tiles + UNION_IDS * 4 + window + 4 * (window // 8 + 1) + 4 * ATTEND_ROWS + 6 * 64
    return rows + amx_attend_scratch(UNION_IDS, lanes, kv_lora, rope_dims) + -(-masks // 64) * 64


#: most distinct ids for which attending the union of ATTEND_ROWS neighbouring rows pays, and what the amx-union engine holds
UNION_IDS = 8192
#: tokens whose membership is formed at once
UNION_WINDOW = 1 << 16


def union_heads(heads: int) -> int:
    """Lanes one row takes in a union (8 or 16), 0 when its heads are too many for a union to pay."""
    return 0 if heads > 16 else 8 if heads <= 8 else 16


#: keys the portable filter offers at once and query rows it offers them to, rows x heads and keys of one of its GEMMs, keys it
#: scores exactly at once; when every key is scored exactly, ``FILTER_KEYS`` at once. No bits depend on them
FILTER_KEYS = 1024
FILTER_BLOCK = 8
FILTER_LINES = 512
FILTER_COLUMNS = 256
EXACT_KEYS = 256


def exact_scratch(heads: int, columns: int) -> int:
    """Scratch bytes of ``index_select.exact.Exact``: fp64 dots and sums, fp32 scores."""
    return columns * (8 * heads + 8 + 4) + 3 * 64


def filter_capacity(topk: int) -> int:
    """Candidates one row of the portable filter holds: the top-k, those the bound cannot tell from them, a tile of new ones."""
    return topk + max(64, topk // 4) + FILTER_KEYS


def filter_step(heads: int) -> int:
    """Query rows of one GEMM of the portable filter."""
    return max(1, min(FILTER_BLOCK, FILTER_LINES // heads))


def rescore_scratch(heads: int, dim: int, columns: int) -> int:
    """Scratch bytes of ``index_select.rescore.Rescore``: a row's query, keys, scales, scores; not the decoder."""
    keys = 8 * dim * max(columns, heads) + columns * (dim + 8)
    return exact_scratch(heads, columns) + keys + heads * (8 * dim + 8) + 6 * 64


def _filter_candidates(topk: int) -> int:
    return FILTER_BLOCK * FILTER_KEYS * (1 + 8 + 12 + 12) + filter_capacity(topk) * (4 + 8 + 3) + EXACT_KEYS * 12 + 16 * 64


def filter_dots(heads: int, dim: int) -> int:
    """Bytes of the dots of one GEMM of the portable filter, in whose place keys are weighed and exact scores are made."""
    dots, keys = 4 * filter_step(heads) * heads * FILTER_COLUMNS, FILTER_KEYS + EXACT_KEYS * dim
    return -(-max(dots, keys, rescore_scratch(heads, dim, EXACT_KEYS)) // 64) * 64


def _filter_shared(topk: int, heads: int, dim: int) -> int:
    keys = FILTER_KEYS * (4 * dim + 4)
    codes = max(EXACT_KEYS, heads) * dim
    decode = decode_scratch(codes) + decode_scratch(max(codes, FILTER_KEYS))
    return filter_dots(heads, dim) + keys + decode + _filter_candidates(topk) + 24 * 64


def _filter_row(topk: int, heads: int, dim: int) -> int:
    return heads * (4 * dim + 4) + 12 * filter_capacity(topk) + 8


def filter_rows(topk: int, heads: int, dim: int) -> int:
    """Query rows of one group of the portable filter; see ``amx_select_rows``."""
    room = FAST_SELECT_BYTES - _filter_shared(topk, heads, dim)
    return max(1, min(FAST_SELECT_ROWS, room // _filter_row(topk, heads, dim)))


def filter_scratch(topk: int, heads: int, dim: int) -> int:
    """Scratch bytes of index_select of fp8 records, portable engine; a multiple of 64. Without the filter: exact scores of a tile
    for ``SELECT_ROWS`` rows.
    """
    fast = filter_rows(topk, heads, dim) * _filter_row(topk, heads, dim) + _filter_shared(topk, heads, dim)
    plain = rescore_scratch(heads, dim, FILTER_KEYS) + decode_scratch(max(FILTER_KEYS, heads) * dim) + _filter_candidates(topk)
    plain += SELECT_ROWS * (12 * filter_capacity(topk) + 4 * KEY_TILE + 8) + 24 * 64
    return -(-max(fast, plain) // 64) * 64
