"""Oracle A: the layer's selection and attention from persistent-cache bytes, in fp64 numpy, by code of its own.

It reads records through two callables (its caller walks the page table), decodes every format itself, scores audited rows over
all visible tokens in streamed blocks, settles the cutoff with integers, and attends in fp64 with a componentwise bound. It
imports neither the kernels nor the runtime and not torch; it shares the formula with them and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palimpsest.core.errors import Unsupported
from palimpsest.prove.bounds import (
    PORTABLE_1,
    U32,
    U64,
    Arithmetic,
    Softmax,
    context_bound,
    lse_bound,
    own_bound,
    score_error,
    sizes_of,
)
from palimpsest.prove.exact import (
    Cutoff,
    Filtered,
    IndexRow,
    ReadIndex,
    decode_bf16,
    decode_e4m3,
    decode_fp32,
    decode_keys,
    exact_cutoff,
    filtered_scores,
    refiner,
)
from palimpsest.prove.ties import exact_faults

#: token ids -> latent record bytes [n, record] u8, from the persistent cache
ReadLatent = Callable[[NDArray[np.int64]], NDArray[np.uint8]]

#: what turning a record into fp32 by a scale that is no power of two costs at most: one fp32 rounding of an fp64 product
DEQUANT_U = U32 + 2 * U64
#: keys scored at once
BLOCK = 8192


def deployed_fp32(filtered: Filtered, format: str) -> NDArray[np.float32] | None:
    """The fp32 scores of the canonical portable arithmetic: dots exact, heads added in ascending order in fp64, one rounding, -0
    made +0.

    [n], bit for bit what ``portable-1`` must rank; None for fp32 records, whose dots round in an order that is not part of the
    contract.
    """
    if format != "fp8":
        return None
    with np.errstate(over="ignore"):
        return filtered.value.astype(np.float32) + np.float32(0)


def stream_scores(
    read_index: ReadIndex, rows: Sequence[IndexRow], visible: Sequence[int], *, block: int = BLOCK
) -> list[Filtered]:
    """Filtered scores of every visible token for each row: rows[j] sees tokens [0, visible[j]). Records are read once per block.

    Keeps 24 bytes per row and token (32 with fp32 records): pass rows in groups that fit.
    """
    out = []
    for row, n in zip(rows, visible, strict=True):
        spread = None if row.format == "fp8" else np.empty(n)
        out.append(Filtered(np.empty(n), np.empty(n), np.empty(n), spread))
    last = max(visible, default=0)
    for start in range(0, last, block):
        stop = min(start + block, last)
        values, scales = read_index(np.arange(start, stop, dtype=np.int64))
        decoded: dict[str, NDArray[np.float64]] = {}
        for row, n, into in zip(rows, visible, out, strict=True):
            count = min(stop, n) - start
            if count <= 0:
                continue
            if row.format not in decoded:
                decoded[row.format] = decode_keys(values, row.format)
            part = filtered_scores(row, decoded[row.format][:count], None if scales is None else scales[:count])
            at = slice(start, start + count)
            into.value[at], into.error[at], into.mass[at] = part.value, part.error, part.mass
            if into.spread is not None and part.spread is not None:
                into.spread[at] = part.spread
    return out


@dataclass(frozen=True)
class SelectionAudit:
    """What the oracle found about one row's selection.

    cutoff:      the exact cutoff (gate K3's truth, K4's and K6's tau and class)
    must_miss:   ids that no deployed rounding within the derived error could leave out, and that are not selected; must_take: ids
                 that none could let in, and that are selected (first 8 of each; counts beside them)
    exact_valid: the set is valid for the real scores too (on lattice data it has to be)
    exact_faults: why not
    canonical_missing: ids of the canonical selection (portable-1, ties to the lowest id) that are not selected; None without
        canonical scores
    scored, score_faults, score_worst: deployed scores compared, how many lie outside s* +- E, the largest |difference| / E
    score_bits:  how many deployed scores differ in bits from the canonical ones; None without both
    nonfinite:   visible scores that are not finite numbers; the rest is meaningless when it is not 0
    """

    visible: int
    m: int
    cutoff: Cutoff
    must_miss: tuple[int, ...]
    must_take: tuple[int, ...]
    missed: int
    taken: int
    exact_valid: bool
    exact_faults: tuple[str, ...]
    canonical_missing: int | None
    scored: int
    score_faults: int
    score_worst: float
    score_bits: int | None
    nonfinite: int

    @property
    def ok(self) -> bool:
        """Gate K3 holds for the row."""
        return not (self.missed or self.taken or self.score_faults or self.nonfinite)


def canonical_selection(scores: NDArray[np.float32], topk: int) -> NDArray[np.int64]:
    """The set of the rule score descending, then token id ascending; ids ascending. NaN ranks as -inf."""
    n, m = len(scores), min(topk, len(scores))
    if m == n:
        return np.arange(n, dtype=np.int64)
    ranked = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    cut = np.partition(ranked, n - m)[n - m]
    above, equal = np.flatnonzero(ranked > cut), np.flatnonzero(ranked == cut)
    return np.sort(np.concatenate([above, equal[: m - len(above)]]))


def _broken(visible: int, m: int, nonfinite: int) -> SelectionAudit:
    none = np.zeros(0, np.int64)
    text = (f"{nonfinite} of {visible} scores are not finite",)
    return SelectionAudit(
        visible, m, Cutoff(m, None, none, none, 0), (), (), 0, 0, False, text, None, 0, 0, 0.0, None, nonfinite
    )  # fmt: skip


def audit_selection(
    read_index: ReadIndex,
    row: IndexRow,
    selected: NDArray[np.integer],
    *,
    topk: int,
    scores: Filtered,
    deployed: NDArray[np.float32] | None = None,
    arithmetic: Arithmetic = PORTABLE_1,
) -> SelectionAudit:
    """Gate K3 of one row against all visible tokens.

    scores: from ``stream_scores``; selected: the emitted ids without pads; deployed [n]: the fp32 scores that were ranked, where
    captured. E comes from ``bounds.score_error``. A deployed score may lie in s* +- E, so its m-th largest lies between the m-th
    largest of s* - E and that of s* + E: an id whose s* - E is above the second must be in, one whose s* + E is below the first
    must be out. The fp64 error of s* is added to E throughout, so that the oracle's rounding blames nobody. NaN deployed scores
    count as outside.
    """
    n = len(scores.value)
    m = min(topk, n)
    nonfinite = int(np.count_nonzero(~np.isfinite(scores.value)))
    if nonfinite:
        return _broken(n, m, nonfinite)
    heads, dim = row.query.shape
    allowed = (
        score_error(arithmetic, value=scores.value, mass=scores.mass, spread=scores.spread, heads=heads, dim=dim) + scores.error
    )
    cutoff = exact_cutoff(scores.value, scores.error, m, refiner(row, read_index))
    picked = np.unique(np.asarray(selected, np.int64))
    inside = np.zeros(n, bool)
    inside[picked[(picked >= 0) & (picked < n)]] = True
    missed = taken = np.zeros(0, np.int64)
    if m:
        low, high = scores.value - allowed, scores.value + allowed
        missed = np.flatnonzero((low > np.partition(high, n - m)[n - m]) & ~inside)
        taken = np.flatnonzero((high < np.partition(low, n - m)[n - m]) & inside)
    faults = exact_faults(selected, cutoff, n)
    canonical = deployed_fp32(scores, row.format) if arithmetic.name == PORTABLE_1.name else None
    bad, worst = 0, 0.0
    if deployed is not None:
        off = np.abs(deployed.astype(np.float64) - scores.value)
        bad = int(np.count_nonzero(~(off <= allowed)))
        worst = float(np.max(off / allowed, initial=0))
    return SelectionAudit(
        visible=n,
        m=m,
        cutoff=cutoff,
        must_miss=tuple(missed[:8].tolist()),
        must_take=tuple(taken[:8].tolist()),
        missed=len(missed),
        taken=len(taken),
        exact_valid=not faults,
        exact_faults=tuple(faults),
        canonical_missing=None if canonical is None else int(np.count_nonzero(~inside[canonical_selection(canonical, topk)])),
        scored=0 if deployed is None else len(deployed),
        score_faults=bad,
        score_worst=worst,
        score_bits=_bits_apart(deployed, canonical),
        nonfinite=0,
    )


def _bits_apart(deployed: NDArray[np.float32] | None, canonical: NDArray[np.float32] | None) -> int | None:
    if deployed is None or canonical is None:
        return None
    same = np.ascontiguousarray(deployed).view(np.uint32) == canonical.view(np.uint32)
    return int(np.count_nonzero(~same))


@dataclass(frozen=True)
class LatentFormat:
    """How a latent record is read: format name, kv_lora value dims, rope (or extra key) dims, per-tensor scale of the plain fp8
    record."""

    name: str
    kv_lora: int
    rope_dims: int
    scale: float = 1.0

    @property
    def dim(self) -> int:
        return self.kv_lora + self.rope_dims

    @property
    def record_bytes(self) -> int:
        """Bytes of one record. Raises Unsupported for an unknown format."""
        if self.name == "fp8_ds_mla":
            return self.kv_lora + 4 * (self.kv_lora // 128) + 2 * self.rope_dims
        sizes = {"fp8": 1, "bf16": 2, "fp32": 4}
        if self.name not in sizes:
            raise Unsupported(f"latent format {self.name!r} has no oracle; it reads fp8, fp8_ds_mla, bf16 and fp32")
        return self.dim * sizes[self.name]


def _power_of_two(scales: NDArray[np.float64]) -> bool:
    return bool(np.all(np.abs(np.frexp(scales)[0]) * 2 == 1))


def decode_latent(records: NDArray[np.uint8], layout: LatentFormat) -> tuple[NDArray[np.float64], float]:
    """([n, kv_lora + rope_dims] exact fp64 values, roundoff of dequantising them to fp32: 0 when every scale is a power of two).

    Raises Unsupported for an unknown format and AssertionError for records of another size.
    """
    assert records.shape[1] == layout.record_bytes, f"records of {records.shape[1]} bytes, {layout.record_bytes} expected"
    if layout.name == "fp8":
        exact = _power_of_two(np.asarray([layout.scale]))
        return decode_e4m3(records) * layout.scale, 0.0 if exact else DEQUANT_U
    if layout.name == "bf16":
        return decode_bf16(records), 0.0
    if layout.name == "fp32":
        return decode_fp32(records), 0.0
    lora, groups = layout.kv_lora, layout.kv_lora // 128
    scales = decode_fp32(records[:, lora : lora + 4 * groups])
    values = decode_e4m3(records[:, :lora]) * np.repeat(scales, 128, axis=1)
    rope = decode_bf16(records[:, lora + 4 * groups :]) if layout.rope_dims else np.zeros((len(records), 0))
    return np.concatenate([values, rope], axis=1), 0.0 if _power_of_two(scales) else DEQUANT_U


@dataclass(frozen=True)
class AttentionTruth:
    """One row's exact attention.

    context, bound [heads, kv_lora]: fp64 context and how far a deployed one may lie from it (oracle's own error included)
    lse, lse_limit [heads]: log-sum-exp of the logits, and its bound; heads_: what ``substitution_power`` needs
    """

    context: NDArray[np.float64]
    bound: NDArray[np.float64]
    lse: NDArray[np.float64]
    lse_limit: NDArray[np.float64]
    softmax: tuple[Softmax, ...]


def attend(
    records: NDArray[np.uint8],
    query: NDArray[np.float64],
    layout: LatentFormat,
    *,
    softmax_scale: float,
    arithmetic: Arithmetic = PORTABLE_1,
) -> AttentionTruth:
    """The attention of one row over its selected records, as emitted: records [n, record] u8, query [heads, dim] exact fp64
    values.

    The order changes nothing here beyond fp64 rounding, which the bound covers. Raises ValueError for n = 0.
    """
    if not len(records):
        raise ValueError("a row that sees nothing has no attention; check that its context is as the contract says")
    keys, dequant_u = decode_latent(records, layout)
    if dequant_u:
        dequant_u = (1 + dequant_u) * (1 + arithmetic.record_u) - 1
    values = np.ascontiguousarray(keys[:, : layout.kv_lora])
    sizes = sizes_of(values)
    logits = softmax_scale * (query @ keys.T)
    spread = abs(softmax_scale) * (np.abs(query) @ np.abs(keys).T)
    heads, contexts, bounds, sums, limits = [], [], [], [], []
    for s, a in zip(logits, spread, strict=True):
        top = s.max()
        total = np.exp(s - top).sum()
        head = Softmax.of(s, a, values, dim=layout.dim, dequant_u=dequant_u, sizes=sizes)
        own = own_bound(head)
        contexts.append(head.context)
        bounds.append(context_bound(arithmetic, head, own) + own)
        lse = float(top + np.log(total))
        sums.append(lse)
        limits.append(lse_bound(arithmetic, head, lse))
        heads.append(head)
    return AttentionTruth(np.array(contexts), np.array(bounds), np.array(sums), np.array(limits), tuple(heads))


@dataclass(frozen=True)
class ContextCheck:
    """Coordinates compared, how many lie outside their bound (NaN counts), the largest |difference| / bound, the first bad (head,
    feature)."""

    checked: int
    faults: int
    worst: float
    first: tuple[int, int] | None


def check_context(context: NDArray[np.float32], truth: AttentionTruth) -> ContextCheck:
    """Gate O2 of one row: the deployed context [heads, kv_lora] against the oracle, componentwise."""
    assert context.shape == truth.context.shape, f"context {context.shape}, oracle {truth.context.shape}"
    off = np.abs(context.astype(np.float64) - truth.context)
    bad = ~(off <= truth.bound)
    where = np.argwhere(bad)
    first = (int(where[0][0]), int(where[0][1])) if len(where) else None
    with np.errstate(invalid="ignore"):
        worst = float(np.nanmax(off / truth.bound, initial=0))
    return ContextCheck(off.size, int(np.count_nonzero(bad)), worst, first)


@dataclass(frozen=True)
class Power:
    """Gate O5 of one row: of ``tried`` single-member substitutions per head, how many every deployed output would betray."""

    tried: int
    detected: int

    @property
    def share(self) -> float:
        return self.detected / self.tried if self.tried else 0.0


def substitution_power(
    truth: AttentionTruth,
    query: NDArray[np.float64],
    others: NDArray[np.uint8],
    layout: LatentFormat,
    *,
    softmax_scale: float,
    seed: int = 0,
) -> Power:
    """Replace one member by a record that was not selected: is the change larger than the bounds of both outputs together?

    others [k, record] u8: unselected records, one substitution each, at seeded positions. Detection is certain when
    |o' - o| > bound + bound' in some coordinate; bound' is taken as bound, since one member of n moves it by a share of about
    1/n.
    """
    keys, _ = decode_latent(others, layout)
    places = np.random.default_rng([seed, len(others)]).integers(0, len(truth.softmax[0].p), len(others))
    detected = 0
    for head, q, bound in zip(truth.softmax, query, truth.bound, strict=True):
        top = head.logits.max()
        gain = (
            np.exp(np.minimum(softmax_scale * (keys @ q) - top, np.log(np.finfo(np.float64).max) / 2))
            * head.p[np.argmax(head.logits)]
        )
        rest = 1 - head.p[places] + gain
        moved = head.context - head.p[places, None] * head.values[places] + gain[:, None] * keys[:, : layout.kv_lora]
        detected += int(np.count_nonzero((np.abs(moved / rest[:, None] - head.context) > 2 * bound).any(axis=1)))
    return Power(len(others) * len(truth.softmax), detected)
