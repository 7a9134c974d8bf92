"""The arithmetic of exported stages: plain torch functions of plain tensors, which end in ``copy_`` into the tensors they change.

None of them knows about memory: every buffer is an argument, and inside one program no changed argument shares a byte with
another.
Everything up to the selection follows ``portable-1`` operation by operation (same GEMM shapes, fp64 norms and rotations, integer
selection keys), so ids, caches and histories are the portable engine's. Attention and the output projection are ``core-1``:
one GEMM
per row over all selected records, heads added in ascending order. Sizes are closed over; nothing reads a number from a tensor
on the
host.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsest.kernels.sizes import COLUMN_TILE, KEY_TILE, ROW_TILE

#: id of the arithmetic, in manifests and records
ARITHMETIC = "core-1"
#: elements that share a scale in an fp8_ds_mla record
BLOCK = 128

_LARGEST, _FLOOR = 448.0, 1e-4
_EXPONENT, _MANTISSA, _SIGN = 0x7F800000, 0x007FFFFF, -0x80000000
_NEGATIVE_INFINITY = 0xFF800000 - (1 << 32)
_LAST = (1 << 63) - 1
_LOW = 0xFFFFFFFF

Function = Callable[..., None]


def positive_zero(x: Tensor) -> Tensor:
    """fp32 with -0 as +0, in integers: the C++ compiler is told that the sign of zero does not matter."""
    bits = x.view(torch.int32)
    return torch.where(bits == _SIGN, 0, bits).view(torch.float32)


def padded(rows: Tensor) -> Tensor:
    """[m, width] as fp32 [ROW_TILE, width], zero rows behind."""
    return F.pad(rows.to(torch.float32), (0, 0, 0, ROW_TILE - rows.shape[0]))


def projected(rows: Tensor, weight: Tensor) -> Tensor:
    """portable-1 projection: fp32 [ROW_TILE, depth] @ ``weight`` [columns, depth].T in blocks of COLUMN_TILE columns."""
    columns = weight.shape[0]
    parts = [
        torch.mm(rows, weight[at : min(at + COLUMN_TILE, columns)].to(torch.float32).t()) for at in range(0, columns, COLUMN_TILE)
    ]
    return positive_zero(parts[0] if len(parts) == 1 else torch.cat(parts, 1))


def absorbed_by(rows: Tensor, up: Tensor) -> Tensor:
    """fp32 [ROW_TILE, nope] @ ``up`` [nope, kv_lora], in blocks of columns.

    Not ``projected(rows, up.t())``: with torch 2.13 and g++ 12.2 that compiled to NaN, while eager torch ran it right
    (docs/format.md). The worker compares every compiled program with eager torch because of it.
    """
    columns = up.shape[1]
    parts = [
        torch.mm(rows, up[:, at : min(at + COLUMN_TILE, columns)].to(torch.float32)) for at in range(0, columns, COLUMN_TILE)
    ]
    return positive_zero(parts[0] if len(parts) == 1 else torch.cat(parts, 1))


def normed(tile: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """RMS norm, or layer norm with a bias: fp64 inside, rounded once to fp32."""
    wide, width = tile.to(torch.float64), tile.shape[1]
    if bias is not None:
        wide = wide - wide.sum(1, keepdim=True) / width
    wide = wide / torch.sqrt((wide * wide).sum(1, keepdim=True) / width + eps) * weight.to(torch.float64)
    if bias is not None:
        wide = wide + bias.to(torch.float64)
    return wide.to(torch.float32)


def rotated(rows: Tensor, table: Tensor | None, layout: str) -> Tensor:
    """``rows`` [m, dims] fp32 by ``table`` [>= m, >= dims/2, 2]; products exact in fp64, one rounding."""
    if table is None or layout == "none" or not rows.shape[1]:
        return rows
    half = rows.shape[1] // 2
    wide = rows.to(torch.float64)
    a, b = (wide[:, :half], wide[:, half:]) if layout == "half" else (wide[:, 0::2], wide[:, 1::2])
    cos, sin = table[:, :half, 0].to(torch.float64), table[:, :half, 1].to(torch.float64)
    first, second = (a * cos - b * sin).to(torch.float32), (b * cos + a * sin).to(torch.float32)
    return torch.cat([first, second], 1) if layout == "half" else torch.stack([first, second], 2).reshape(rows.shape)


def hadamard(tile: Tensor) -> Tensor:
    """``tile`` [m, dim] @ H / sqrt(dim) by butterflies in fp64."""
    m, dim = tile.shape
    wide, step = tile.to(torch.float64), 1
    while step < dim:
        view = wide.reshape(m, dim // (2 * step), 2, step)
        wide = torch.stack([view[:, :, 0] + view[:, :, 1], view[:, :, 0] - view[:, :, 1]], 2)
        step *= 2
    return positive_zero((wide.reshape(m, dim) * dim**-0.5).to(torch.float32))


def quantised(tile: Tensor, block: int, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """e4m3 codes [m, width] and fp32 scales [m, width/block]; see ``kernels.fp8.Quantiser``."""
    spread = tile.reshape(tile.shape[0], -1, block)
    bits = spread.abs().amax(2).view(torch.int32).clamp(max=_EXPONENT)
    scale = torch.clamp(bits.view(torch.float32), min=_FLOOR) / _LARGEST
    if power_of_two:
        bits = (scale.view(torch.int32).clamp(max=_EXPONENT) + _MANTISSA) & _EXPONENT
        scale = bits.view(torch.float32)
    codes = (spread / scale.unsqueeze(2)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.reshape(tile.shape), scale


def rope_table() -> Function:
    """positions i64 [m], inv_freq [half] -> table [m, half, 2]."""

    def run(positions: Tensor, inv_freq: Tensor, table: Tensor) -> None:
        angle = (positions.to(torch.float32).unsqueeze(1) * inv_freq).to(torch.float64)
        table.copy_(torch.stack([torch.cos(angle), torch.sin(angle)], 2))

    return run


def query_latent(eps: float) -> Function:
    def run(hidden: Tensor, weight: Tensor, norm: Tensor, out: Tensor) -> None:
        out.copy_(normed(projected(padded(hidden), weight), norm, eps)[: out.shape[0]])

    return run


def attention_query(nope: int, layout: str, rope: bool) -> Function:
    """One head: q_latent [m, q_lora], q_b [nope + rope, q_lora], uk [nope, kv_lora] (, table) -> query [m, kv_lora + rope]."""

    def body(source: Tensor, down: Tensor, up: Tensor, table: Tensor | None, out: Tensor) -> None:
        m = out.shape[0]
        q = projected(padded(source), down)
        absorbed = absorbed_by(padded(q[:m, :nope]), up)
        out.copy_(torch.cat([absorbed[:m], rotated(q[:m, nope:], table, layout)], 1))

    return _with_table(body, 3, rope)


def append_latent(kv_lora: int, eps: float, layout: str, fmt: str, scale: float, *, rope: bool) -> Function:
    """hidden, kv_a, kv_a_norm (, table) -> record planes of the tile: values, or (codes, scales, keys) for fp8_ds_mla."""

    def body(hidden: Tensor, weight: Tensor, norm: Tensor, table: Tensor | None, *out: Tensor) -> None:
        m = out[0].shape[0]
        tile = projected(padded(hidden), weight)
        latent, key = normed(tile[:, :kv_lora], norm, eps)[:m], rotated(tile[:m, kv_lora:], table, layout)
        if fmt == "fp8_ds_mla":
            codes, scales = quantised(latent, BLOCK, power_of_two=False)
            for target, value in zip(out, (codes, scales, key), strict=False):
                target.copy_(value)
            return
        record = torch.cat([latent, key], 1)
        out[0].copy_((record / scale).clamp(-_LARGEST, _LARGEST) if fmt == "fp8" else record)

    return _with_table(body, 3, rope)


def head_weights(heads: int, dim: int) -> Function:
    def run(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_((projected(padded(hidden), weight) * heads**-0.5 * dim**-0.5)[: out.shape[0]])

    return run


def index_query(dim: int, rope_dims: int, layout: str, *, rotate: bool, fmt: str, power_of_two: bool, rope: bool) -> Function:
    """One head: q_latent, index_q [dim, q_lora] (, table) -> query [m, dim]; its column of head weights times the scale (fp8)."""

    def body(source: Tensor, weight: Tensor, table: Tensor | None, out: Tensor, column: Tensor | None = None) -> None:
        m = out.shape[0]
        tile = _index_record(projected(padded(source), weight)[:m], table, rope_dims, layout, rotate)
        if fmt != "fp8":
            out.copy_(tile)
            return
        codes, scales = quantised(tile, dim, power_of_two=power_of_two)
        out.copy_(codes)
        assert column is not None
        column.copy_(column * scales[:, 0])

    return _with_table(body, 2, rope)


def append_index(
    dim: int, eps: float, rope_dims: int, layout: str, *, rotate: bool, fmt: str, power_of_two: bool, rope: bool
) -> Function:
    """hidden, index_k, norm, bias (, table) -> keys [m, dim] (and scales [m], fp8)."""

    def body(hidden: Tensor, weight: Tensor, norm: Tensor, bias: Tensor, table: Tensor | None, *out: Tensor) -> None:
        tile = normed(projected(padded(hidden), weight), norm, eps, bias)[: out[0].shape[0]]
        tile = _index_record(tile, table, rope_dims, layout, rotate)
        if fmt != "fp8":
            out[0].copy_(tile)
            return
        codes, scales = quantised(tile, dim, power_of_two=power_of_two)
        out[0].copy_(codes)
        out[1].copy_(scales[:, 0])

    return _with_table(body, 4, rope)


def _index_record(tile: Tensor, table: Tensor | None, rope_dims: int, layout: str, rotate: bool) -> Tensor:
    if table is not None and layout != "none" and rope_dims:
        tile = torch.cat([rotated(tile[:, :rope_dims], table, layout), tile[:, rope_dims:]], 1)
    return hadamard(tile) if rotate else tile


def gather_pages(offsets: tuple[int, ...]) -> Function:
    """pages u8 [n, page bytes] -> history planes u8 [n, page * width], which begin at ``offsets`` of a page."""

    def run(pages: Tensor, *planes: Tensor) -> None:
        for at, plane in zip(offsets, planes, strict=True):
            plane.copy_(pages[:, at : at + plane.shape[1]])

    return run


def select_tile(stored: bool) -> Function:
    """One key tile of a group of rows: scores, then the ``topk`` best of the state and the tile.

    query [m, heads, dim], weights [m, heads], keys [n, dim] (, scales [n]), seen i64 [m] (tokens each row sees), start i64 [2]
    (first token of the view, first token not scored before), state i64 [m, topk], nans i32 [m].
    """

    def body(query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, seen: Tensor, start: Tensor, state: Tensor,
             nans: Tensor) -> None:  # fmt: skip
        m, heads, dim = query.shape
        n, wide_keys = keys.shape[0], keys.to(torch.float64)
        if scales is None:
            wide_keys = F.pad(wide_keys, (0, 0, 0, KEY_TILE - n))  # fp32 dots round: one shape, as the portable engine has
        dots = torch.mm(query.to(torch.float64).reshape(m * heads, dim), wide_keys.t()).reshape(m, heads, -1)[:, :, :n]
        wide = weights.to(torch.float64)
        total = torch.zeros_like(dots[:, 0])
        for head in range(heads):
            total = total + torch.clamp(dots[:, head], min=0.0) * wide[:, head].unsqueeze(1)
        if scales is not None:
            total = total * scales.to(torch.float64)
        scores, ids = positive_zero(total.to(torch.float32)), start[0] + torch.arange(n)
        visible, lost = (ids >= start[1]) & (ids < seen.unsqueeze(1)), torch.isnan(scores)
        first = start[1] == 0
        bits = torch.where(lost, _NEGATIVE_INFINITY, scores.view(torch.int32))
        order = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
        found = torch.where(visible, (order.to(torch.int64) << 32) | ids, _LAST)
        kept = torch.where(first, _LAST, state)
        best = torch.topk(torch.cat([kept, found], 1), state.shape[1], dim=1, largest=False, sorted=False)[0]
        state.copy_(best)
        count = (lost & visible).sum(1).to(torch.int32)
        nans.copy_(torch.where(first, 0, nans) + count)

    if stored:
        return body

    def run(query: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, start: Tensor, state: Tensor, nans: Tensor) -> None:
        body(query, weights, keys, None, seen, start, state, nans)

    return run


def select_emit(topk: int) -> Function:
    """state i64 [m, topk], seen i64 [m] -> ids i32 [m, topk] ascending, -1 behind; counts i32 [m]."""

    def run(state: Tensor, seen: Tensor, ids: Tensor, counts: Tensor) -> None:
        found = torch.sort(state & _LOW, dim=1)[0]
        count = seen.clamp(max=topk)
        used = torch.arange(topk) < count.unsqueeze(1)
        ids.copy_(torch.where(used, found, -1))
        counts.copy_(count)

    return run


def attend(fmt: str, kv_lora: int, latent_scale: float, softmax_scale: float) -> Function:
    """One row: ids i32 [topk], count i32 [1], record planes [tokens, ...], query [heads, dim] -> context [heads, kv_lora]."""

    def run(ids: Tensor, count: Tensor, *rest: Tensor) -> None:
        planes, query, context = rest[:-2], rest[-2], rest[-1]
        valid = torch.arange(ids.shape[0]) < count
        rows = torch.where(valid, ids, 0).to(torch.int64)
        taken = [p[rows] for p in planes]
        records = torch.where(valid.unsqueeze(1), _decoded(taken, fmt, kv_lora, latent_scale), 0.0)
        dots = torch.mm(query.to(torch.float64), records.to(torch.float64).t())
        logits = torch.where(valid, (dots * softmax_scale).to(torch.float32), -torch.inf)
        p = torch.where(valid, torch.exp(logits - logits.amax(1, keepdim=True)), 0.0)
        out = torch.mm(p, records[:, :kv_lora]) / p.sum(1, keepdim=True)
        context.copy_(torch.where(count > 0, out, 0.0))

    return run


def _decoded(planes: list[Tensor], fmt: str, kv_lora: int, latent_scale: float) -> Tensor:
    """Record planes of selected tokens -> fp32 [n, dim]."""
    if fmt == "fp8_ds_mla":
        codes, scales = planes[0].to(torch.float32), planes[1]
        values = (codes.reshape(codes.shape[0], -1, BLOCK) * scales.unsqueeze(2)).reshape(codes.shape)
        return torch.cat([values, *(key.to(torch.float32) for key in planes[2:])], 1)
    if fmt == "fp8":
        return (planes[0].to(torch.float32).to(torch.float64) * latent_scale).to(torch.float32)
    return planes[0].to(torch.float32)


def project_head(gated: bool) -> Function:
    """One head: context [m, kv_lora], uv [v, kv_lora] (, hidden [m, hidden], gate [v, hidden]), o [hidden, v]; added to
    partial.
    """

    def body(context: Tensor, uv: Tensor, hidden: Tensor | None, gate: Tensor | None, o: Tensor, partial: Tensor) -> None:
        m = partial.shape[0]
        value = projected(padded(context), uv)
        if hidden is not None and gate is not None:
            value = value * torch.sigmoid(projected(padded(hidden), gate))
        partial.copy_(partial + torch.mm(value, o.to(torch.float32).t())[:m])

    if gated:
        return body

    def run(context: Tensor, uv: Tensor, o: Tensor, partial: Tensor) -> None:
        body(context, uv, None, None, o, partial)

    return run


def _with_table(body: Callable[..., None], inputs: int, rope: bool) -> Function:
    """``body`` takes the rotary table behind its inputs; without RoPE there is none."""
    if rope:
        return body
    return lambda *tensors: body(*tensors[:inputs], None, *tensors[inputs:])


__all__ = [
    "ARITHMETIC", "KEY_TILE", "append_index", "append_latent", "attend", "attention_query", "gather_pages", "head_weights",
    "index_query", "project_head", "query_latent", "rope_table", "select_emit", "select_tile",
]  # fmt: skip
