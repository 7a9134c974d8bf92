"""The eleven cases, symbolically, resolved for a profile.

A case is data: history length, active rows, data regime, planted records, and the least of everything it must show. Nothing here
runs a layer; ``data.py`` makes the bytes and the driver walks the table. Symbols: T prepared tokens, R prepared rows, W ranks, S
= R/W rows of one rank, K top-k, P page tokens, H history tokens, a active rows. Standard library only.
"""

import hashlib
from dataclasses import dataclass

from palimpsest.core.errors import BadConfig, UnknownName
from palimpsest.core.geometry import Formats, Geometry, index_record_bytes, latent_record_bytes
from palimpsest.core.spec import Limits

#: what fills the reusable bytes before a replay: nothing, NaN, high-plausible, low-plausible, stale contents, address-derived
POISONS = ("none", "Pn", "Ph", "Pl", "Ps", "Pa")


#: smallest top-k: more than the boundary records of one case (11), which must all be selected together
LEAST_TOPK = 16


@dataclass(frozen=True)
class Profile:
    """A prepared size: ``tokens`` T, ``rows`` R, ``ranks`` W, ``page`` P."""

    name: str
    tokens: int
    rows: int
    ranks: int
    page: int

    @property
    def slice_rows(self) -> int:
        """S: query rows one rank selects for."""
        return -(-self.rows // self.ranks)

    @property
    def limits(self) -> Limits:
        return Limits(tokens=self.tokens, rows=self.rows, ranks=self.ranks, page=self.page)


@dataclass(frozen=True)
class Records:
    """Bytes of one token: whole index record, its value part, whole latent record."""

    index: int = 132
    values: int = 128
    latent: int = 576


@dataclass(frozen=True)
class Minima:
    """The least a case must show, else it is INCONCLUSIVE (gates K6, V3).

    tie_rows:  lattice rows (planted ties and the zero row) whose exact cutoff class has at least 2 members of which not all are
        taken
    sides:     sides of the alias end on which members of one such class lie
    shards:    ranks owning members of one such class
    zero_rows: rows whose visible scores are all zero, with more visible tokens than K
    pads:      emitted slots holding the pad value, over all prepared rows and all replays
    boundary:  planted records that every lattice row but the zero row selects when they are visible to it
    """

    tie_rows: int = 0
    sides: int = 0
    shards: int = 0
    zero_rows: int = 0
    pads: int = 0
    boundary: int = 0


@dataclass(frozen=True)
class Replay:
    """One replay of the prepared layer.

    poison:  one of ``POISONS``, written over all reusable bytes before it
    inputs:  name of the hidden rows (and injected queries): equal names mean equal bytes
    regime:  of the query rows: ``natural``, ``lattice``, ``mixed`` (even rows lattice) or ``none`` (no rows)
    restore: put the persistent records of [history, history + rows) back afterwards, because a later replay of the queue must
             find the history it would have found without this one
    """

    history: int
    rows: int
    poison: str
    inputs: str
    regime: str
    restore: bool = False

    @property
    def visible(self) -> int:
        """H + a: tokens in the caches after the append."""
        return self.history + self.rows


@dataclass(frozen=True)
class Case:
    """One row of the table.

    queue:   cases of one non-empty queue are enqueued together, without a host synchronisation between them
    records: regime of the index records (``natural`` or ``lattice``); latent records are natural always
    data:    name of the index history: equal names mean equal bytes
    tie_stride: lattice tokens whose id is ``tie_stride - 1`` modulo it form one planted tie class; 0 means none
    planted: ids whose index record every lattice row (but the zero row) must select when it sees them
    equals:  id of the case whose results this one must repeat byte for byte, or ""
    """

    id: str
    name: str
    queue: str
    steps: tuple[Replay, ...]
    records: str
    data: str
    planted: tuple[int, ...]
    tie_stride: int
    minima: Minima
    equals: str = ""

    @property
    def regime(self) -> str:
        """``natural``, ``lattice`` or ``mixed``: what the case is about."""
        kinds = {s.regime for s in self.steps} - {"none"}
        return "mixed" if len(kinds) > 1 else (kinds.pop() if kinds else "natural")


PROFILES = {
    "full": Profile("full", 1 << 20, 4096, 16, 64),
    "wide": Profile("wide", 1 << 20, 64, 4, 64),
    "small": Profile("small", 4096, 256, 16, 16),
}


def profile(
    name: str, *, ranks: int | None = None, tokens: int | None = None, rows: int | None = None, page: int | None = None
) -> Profile:
    """A named profile, with any of its numbers replaced. Raises UnknownName."""
    if name not in PROFILES:
        raise UnknownName("profile", name, list(PROFILES))
    base = PROFILES[name]
    return Profile(name, tokens or base.tokens, rows or base.rows, ranks or base.ranks, page or base.page)


def records_of(geometry: Geometry, formats: Formats) -> Records:
    """The record sizes of a geometry under the stored formats."""
    dim = geometry.indexer.dim
    values = dim if formats.index == "fp8" else 4 * dim
    return Records(index_record_bytes(geometry, formats), values, latent_record_bytes(geometry, formats))


def check_profile(p: Profile, topk: int) -> None:
    """Refuse sizes on which the boundaries collapse. Raises BadConfig with both numbers."""
    if p.rows % p.ranks:
        raise BadConfig(f"profile {p.name}: {p.rows} rows do not divide over {p.ranks} ranks; use a multiple of {p.ranks}")
    if p.rows * 4 > p.tokens:
        raise BadConfig(
            f"profile {p.name}: {p.rows} rows exceed a quarter of {p.tokens} tokens; use at most {p.tokens // 4} rows"
        )
    if p.tokens % (16 * p.page):
        raise BadConfig(f"profile {p.name}: {p.tokens} tokens are not a multiple of 16 pages of {p.page}; use {16 * p.page} x n")
    if p.page < 4:
        raise BadConfig(f"profile {p.name}: a page of {p.page} tokens has no interior; use at least 4")
    if not LEAST_TOPK <= topk <= p.tokens // 4:
        raise BadConfig(f"profile {p.name}: top-k {topk} must lie in {LEAST_TOPK}..{p.tokens // 4} for {p.tokens} tokens")
    if p.rows < 4:
        raise BadConfig(f"profile {p.name}: {p.rows} rows leave no shrinking chunk; use at least 4")


def boundary_ids(p: Profile, records: Records, history: int, rows: int) -> tuple[int, ...]:
    """Record ids at which an aliased history can go wrong, that a chunk [history, history + rows) can see; ascending.

    The records that straddle the alias end ``floor(index * T / latent)`` and the plane boundary ``floor(values * T / latent)``,
    with their neighbours; 0, H-1, H, H+a-1, T-1.
    """
    end, plane = records.index * p.tokens // records.latent, records.values * p.tokens // records.latent
    wanted = [0, history - 1, history, history + rows - 1, p.tokens - 1]
    wanted += [end - 1, end, end + 1, plane - 1, plane, plane + 1]
    return tuple(sorted({i for i in wanted if 0 <= i < history + rows}))


def shrinking_rows(p: Profile, topk: int) -> tuple[int, ...]:
    """C08's row counts: R, K+1 (R/2+1 when K >= R), S+1, S, S-1, 1, 0, descending, each once."""
    middle = topk + 1 if topk < p.rows else p.rows // 2 + 1
    s = p.slice_rows
    return tuple(sorted({c for c in (p.rows, middle, s + 1, s, s - 1, 1, 0) if c <= p.rows}, reverse=True))


def zero_row(rows: int) -> int:
    """The lattice row whose query is all zero: three quarters down the chunk, so that a cold chunk already crossed K there."""
    return 3 * rows // 4


def _sizes(p: Profile, topk: int) -> dict[str, tuple[int, int]]:
    """(H, a) of every case but C08."""
    t, r, s = p.tokens, p.rows, p.slice_rows
    ragged = -(-1000 * r // 4096)
    ragged -= ragged % s == 0
    return {
        "C01": (0 if topk < r else topk - r // 2, r),
        "C02": (t // 2, r),
        "C03": (t - r, r),
        "C04": (t - r + 1, r - 1),
        "C05": (t // 8 - 1, 9 * p.ranks // 16 * s + 1),
        "C06": (topk - 1, 1),
        "C07": (t * 667573 // 1000000 | 1, 0),
        "C10": (t // 16 + 1, max(1, ragged)),
    }


def _tie_stride(history: int, topk: int) -> int:
    """The largest odd stride that leaves at least K + K/4 + 1 members below ``history``; 0 when there is none above 1."""
    stride = history // (topk + topk // 4 + 1)
    stride -= stride % 2 == 0
    return stride if stride >= 3 else 0


def _last_lattice(step: Replay) -> int:
    """The last row that must select the planted records it sees: in a mixed chunk an even one, and never the all-zero row. -1
    without any."""
    stride = 2 if step.regime == "mixed" else 1
    return max((row for row in range(0, step.rows, stride) if row != zero_row(step.rows)), default=-1)


def _minima(
    p: Profile, topk: int, records: Records, steps: tuple[Replay, ...], planted: tuple[int, ...], lattice: bool, stride: int
) -> Minima:
    """What the plants guarantee by counting: every even lattice row but the zero row cuts inside a planted class of stride
    ``stride``."""
    pads = sum(p.rows * topk - sum(min(topk, s.history + r + 1) for r in range(s.rows)) for s in steps)
    boundary = sum(i <= max((s.history + _last_lattice(s) for s in steps), default=-1) for i in planted)
    floods = sum(s.history + zero_row(s.rows) + 1 > topk for s in steps if s.rows) if lattice else 0
    if not floods:
        return Minima(pads=pads, boundary=boundary)
    seen = min(s.history + zero_row(s.rows) + 1 for s in steps)
    sides = 1 + (seen > records.index * p.tokens // records.latent + 1)
    shards = min(p.ranks, -(-seen // p.page))
    planted_ties = sum(row != zero_row(s.rows) for s in steps for row in range(0, s.rows, 2)) if stride else 0
    return Minima(
        tie_rows=floods + planted_ties, sides=sides, shards=min(2, shards), zero_rows=floods, pads=pads, boundary=boundary
    )


@dataclass(frozen=True)
class _Shape:
    """How one row of the table is written down; the symbols are resolved by ``_build``."""

    id: str
    name: str
    regime: str
    poison: str = "Pa"
    same: str = ""
    queue: str = ""
    restore: bool = False


_TABLE = (
    _Shape("C01", "cold full", "mixed"),
    _Shape("C02", "mid full", "natural"),
    _Shape("C03", "near-limit exact", "lattice", "Pn"),
    _Shape("C04", "near-limit ragged", "natural", "Ph"),
    _Shape("C05", "partial", "lattice", "Pl"),
    _Shape("C06", "one row, n = K", "natural", "Pn"),
    _Shape("C07", "empty", "none"),
    _Shape("C08", "shrinking rows", "natural", "Ps"),
    _Shape("C09", "queued replay 1", "lattice", "Pn", same="C03", queue="replays"),
    _Shape("C10", "queued replay 2", "natural", "Ph", queue="replays", restore=True),
    _Shape("C11", "queued replay 3", "lattice", "Ps", same="C03", queue="replays"),
)


def _build(shape: _Shape, p: Profile, topk: int, records: Records) -> Case:
    sizes = _sizes(p, topk)
    history, rows = sizes.get(shape.same or shape.id, (p.tokens // 4 - 1, 0))
    counts = shrinking_rows(p, topk) if shape.id == "C08" else (rows,)
    inputs = shape.same or shape.id
    steps = tuple(
        Replay(
            history=history,
            rows=a,
            poison=shape.poison if i == 0 else "Ps",
            inputs=inputs if len(counts) == 1 else f"{inputs}.{i}",
            regime=shape.regime if a else "none",
            restore=shape.restore,
        )
        for i, a in enumerate(counts)
    )
    lattice = shape.regime in ("lattice", "mixed")
    stride = _tie_stride(sizes["C03"][0] if shape.queue else history, topk) if lattice or shape.queue else 0
    queued = shape.queue == "replays"
    planted = boundary_ids(p, records, history, rows) if lattice else ()
    return Case(
        id=shape.id,
        name=shape.name,
        queue=shape.queue,
        steps=steps,
        records="lattice" if lattice or queued else "natural",
        data="C03" if queued else (inputs if lattice else "natural"),
        planted=boundary_ids(p, records, *sizes["C03"]) if queued else planted,
        tie_stride=stride,
        minima=_minima(p, topk, records, steps, planted, lattice, stride),
        equals="C09" if shape.id == "C11" else "",
    )


def cases(p: Profile, topk: int, records: Records | None = None) -> tuple[Case, ...]:
    """The eleven cases C01..C11 of a profile, in order. Raises BadConfig when the profile cannot hold them."""
    check_profile(p, topk)
    return tuple(_build(shape, p, topk, records or Records()) for shape in _TABLE)


def refusals(p: Profile, topk: int) -> dict[str, dict[str, int]]:
    """Requests that must raise before a byte is touched: name -> the sizes that differ from the profile's."""
    return {
        "one token too many": {"history": p.tokens - p.rows + 1, "rows": p.rows},
        "one row too many": {"history": 0, "rows": p.rows + 1},
        "negative rows": {"history": 0, "rows": -1},
        "negative history": {"history": -1, "rows": 1},
        "tokens not whole pages": {"tokens": p.tokens + 1},
        "top-k above tokens": {"topk": p.tokens + 1},
    }


def rank_rows(p: Profile, rows: int) -> tuple[int, ...]:
    """Active rows in each rank's slice."""
    s = p.slice_rows
    return tuple(max(0, min(s, rows - r * s)) for r in range(p.ranks))


def audited_rows(p: Profile, replay: Replay, seed: int) -> tuple[tuple[int, int], ...]:
    """Pairs (row, rank) that the oracle recomputes: ends of each rank's active slice, the first and last active row, 2 seeded
    rows a rank."""
    chosen: set[int] = set()
    for rank, count in enumerate(rank_rows(p, replay.rows)):
        if not count:
            continue
        first = rank * p.slice_rows
        chosen |= {first, first + count - 1}
        for draw in range(2):
            text = f"audit/{seed}/{replay.inputs}/{rank}/{draw}".encode()
            chosen.add(first + int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % count)
    if replay.rows:
        chosen |= {0, replay.rows - 1}
    return tuple((row, row // p.slice_rows) for row in sorted(chosen))


def expected_checks(p: Profile, topk: int, replay: Replay, rank: int) -> dict[str, int]:
    """What a complete check of one replay on one rank must have counted (gate V1), in closed form.

    rows, pad_rows: active and inactive rows of all ranks; slice_rows: active rows of this rank's slice; selected, pads: emitted
    ids and pad slots over all prepared rows; slice_selected: emitted ids of this rank's slice; visible: row-token pairs of this
    slice;
    history: tokens of each gathered history; shard: history tokens whose pages this rank owns; appended: new tokens this rank
        owns.
    """

    def triangle(first: int, count: int) -> int:
        """Sum of first, first+1, ... over count terms."""
        return count * first + count * (count - 1) // 2

    def chosen(first: int, count: int) -> int:
        """Sum of min(K, first + j) over j < count."""
        below = min(count, max(0, topk - first + 1))
        return triangle(first, below) + (count - below) * topk

    def owned(tokens: int) -> int:
        """Tokens below ``tokens`` in pages that this rank owns."""
        cycle = p.page * p.ranks
        return tokens // cycle * p.page + max(0, min(p.page, tokens % cycle - rank * p.page))

    start = min(rank * p.slice_rows, replay.rows)
    mine = min((rank + 1) * p.slice_rows, replay.rows) - start
    selected = chosen(replay.history + 1, replay.rows)
    return {
        "rows": replay.rows,
        "pad_rows": p.rows - replay.rows,
        "slice_rows": mine,
        "selected": selected,
        "pads": p.rows * topk - selected,
        "slice_selected": chosen(replay.history + 1 + start, mine),
        "visible": triangle(replay.history + 1 + start, mine),
        "history": replay.visible,
        "shard": owned(replay.visible),
        "appended": owned(replay.visible) - owned(replay.history),
    }


def coverage(p: Profile, table: tuple[Case, ...], topk: int) -> dict[str, set[str]]:
    """The boundary coverage matrix: label -> ids of the cases that show it. An empty set is a hole."""
    s, t = p.slice_rows, p.tokens
    found: dict[str, set[str]] = {}

    def note(label: str, hit: bool, case: Case) -> None:
        found.setdefault(label, set()).update({case.id} if hit else ())

    names = {"0": 0, "1": 1, "S-1": s - 1, "S": s, "S+1": s + 1, "K+1": topk + 1, "R-1": p.rows - 1, "R": p.rows}
    for case in table:
        for step in case.steps:
            h, a = step.history, step.rows
            note("n=0", a < p.rows, case)
            for label, n in {"1": 1, "K-1": topk - 1, "K": topk, "K+1": topk + 1, "T": t}.items():
                note(f"n={label}", h < n <= h + a, case)
            for label, value in names.items():
                note(f"a={label}", a == value, case)
            for label, value in {"0": 0, "1": 1, "P-1": p.page - 1}.items():
                note(f"H mod P={label}", a > 0 and h % p.page == value, case)
            note("H+a=T", h + a == t, case)
            note("H+a=T ragged", h + a == t and h % p.page != 0, case)
            for label, value in {"0": 0, "1": 1, "S-1": s - 1, "S": s}.items():
                note(f"rank with {label} rows", a > 0 and value in rank_rows(p, a), case)
    return found
