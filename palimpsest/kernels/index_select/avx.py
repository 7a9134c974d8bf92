"""index_select, ``avx`` engine: groups of rows on threads, each group streaming the keys once through an exact top-k.

Two kernels of the same bits and the same planned scratch: VDPBF16PS where the compile target has it and a probe finds the order
of roundings that ``avx-1`` is made of, else plain loops. fp8 records; fp32 records are selected by the portable engine's file,
in its arithmetic.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from palimpsest.kernels import detect, emulate, sizes
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.index_select import cpu
from palimpsest.kernels.index_select.streaming import Kernels, select


def _table(scratch: Scratch) -> torch.Tensor:
    """Values of the 256 codes."""
    codes = scratch.take((256,), "u8")
    torch.arange(256, out=codes)
    return scratch.take((256,), "fp32").copy_(codes.view(torch.float8_e4m3fn))


def _state(scratch: Scratch, rows: int, topk: int, tile: int) -> dict[str, Any]:
    """What both kernels keep (``sizes.avx_select_scratch``)."""
    capacity = sizes.fast_capacity(topk)
    return {
        "scores": scratch.take((sizes.SELECT_ROWS, tile), "fp32").numpy(),
        "candidates": scratch.take((rows, capacity), "i32").numpy(),
        "ids": scratch.take((rows, capacity), "i32").numpy(),
        "held": scratch.take((rows,), "i64").numpy(),
        "least": scratch.take((rows,), "i32").numpy(),
        "seen": scratch.take((rows,), "i64").numpy(),
        "work": scratch.take((4 * capacity,), "i32").numpy(),
        "sample": scratch.take((16,), "i32").numpy(),
        "topk": topk,
    }


def plain_loops() -> Kernels:
    """The kernels of ``avx_kernel``, compiled."""
    from palimpsest.kernels.index_select.avx_kernel import RUN, Group, begin, emit, pass_tiles

    def group(scratch: Scratch, params: Mapping[str, Any]) -> Group:
        topk, heads, dim = params["topk"], sizes.avx_heads(params["heads"]), sizes.avx_dim(params["dim"])
        rows, tile = sizes.avx_select_rows(topk, params["heads"], params["dim"]), sizes.AMX_KEY_TILE
        state = _state(scratch, rows, topk, tile)
        return Group(
            table=_table(scratch).numpy(),
            wide=scratch.take((rows, heads, dim), "fp32").numpy(),
            weights=scratch.take((rows, heads), "fp32").numpy(),
            columns=scratch.take((tile // RUN, dim, RUN), "fp32").numpy(),
            sums=scratch.take((4, RUN), "fp32").numpy(),
            line=scratch.take((tile,), "i32").numpy(),
            **state,
        )

    return Kernels(lambda call: group(call.scratch, call.params), begin, pass_tiles, emit)


def vector_dots() -> Kernels:
    """The kernels of ``avx512_kernel``, compiled. Only where ``detect.has_vdpbf16ps``: elsewhere LLVM ends the process."""
    from palimpsest.kernels.index_select.avx512_kernel import TILE, Group, begin, emit, pass_tiles

    def group(scratch: Scratch, params: Mapping[str, Any]) -> Group:
        topk, heads, dim = params["topk"], sizes.avx_heads(params["heads"]), sizes.avx_dim(params["dim"])
        rows = sizes.avx_select_rows(topk, params["heads"], params["dim"])
        return Group(
            wide=scratch.take((rows, dim // 2, heads), "i32").numpy(),
            weights=scratch.take((rows, heads), "fp32").numpy(),
            packed=scratch.take((TILE * dim // 2,), "i32").numpy(),
            tail=scratch.take((16, dim), "u8").numpy(),
            scales=scratch.take((TILE,), "fp32").numpy(),
            **_state(scratch, rows, topk, TILE),
        )

    return Kernels(lambda call: group(call.scratch, call.params), begin, pass_tiles, emit)


class _Alone:
    """The call of a probe: scratch and parameters, no buffers."""

    def __init__(self, heads: int, dim: int):
        self.params = {"topk": 1, "heads": heads, "dim": dim}
        self.scratch = Scratch(torch.empty(sizes.avx_select_scratch(1, heads, dim) + 64, dtype=torch.uint8))
        self.scratch.raw = self.scratch.raw[-self.scratch.raw.data_ptr() % 64 :]


def probe_tile() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Seeded queries [12, 128] and keys [113, 128] of any finite e4m3 codes, weights and scales: ragged in heads and keys."""
    rng = np.random.default_rng(20)
    codes = rng.integers(0, 254, (12 + 113, 128), dtype=np.uint8)
    codes += codes >= 127
    return codes[:12], rng.standard_normal(12, np.float32), codes[12:], rng.random(113, np.float32) + np.float32(0.5)


def scores_of(kernels: Kernels) -> np.ndarray:
    """What ``kernels`` make of the probe tile."""
    queries, weights, keys, scales = probe_tile()
    group = kernels.make(cast(Call, _Alone(*queries.shape)))
    kernels.begin(group, queries[None], weights[None])
    seen = np.array([len(keys)])
    kernels.score(group, keys, scales, seen, 0, len(keys), True, np.zeros(1, np.int32))
    return np.array(group.scores[0, : len(keys)])


def rounds_as_avx_1(kernels: Kernels, probe: Callable[[Kernels], np.ndarray] = scores_of) -> bool:
    """Whether the probe tile's scores are those of ``emulate``, bit for bit."""
    queries, weights, keys, scales = probe_tile()
    query, key = (torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy() for codes in (queries, keys))
    return probe(kernels).tobytes() == emulate.avx_scores(query, weights, key, scales).tobytes()


def choose(probe: Callable[[Kernels], np.ndarray] = scores_of) -> tuple[Kernels, str]:
    """The kernels of this machine, compiled, and which they are and why."""
    if not detect.has_vdpbf16ps():
        return plain_loops(), "plain loops: the compile target lacks VDPBF16PS"
    kernels = vector_dots()
    if rounds_as_avx_1(kernels, probe):
        return kernels, "VDPBF16PS"
    return plain_loops(), "plain loops: this machine's VDPBF16PS does not round in the order of avx-1"


KERNELS, CHOSEN = choose()


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if call.params["format"] == "fp8":
        select(call, chunk, KERNELS)
    else:
        cpu.run(call, chunk)
