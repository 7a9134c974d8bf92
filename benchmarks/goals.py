"""The rows of the table: what is measured, against what, and what is wanted of it."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from benchmarks.clock import Reference, of_p, peak_of, race
from benchmarks.peer import HOT, Ours, Shape, Theirs
from benchmarks.problems import Attention, Index


@dataclass
class Row:
    """One measured goal. ``value`` and ``goal`` in ``unit``; more is better unless ``at_most``."""

    name: str
    value: float
    goal: float | None
    unit: str
    detail: dict[str, object] = field(default_factory=dict)
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def plain(self) -> dict[str, object]:
        return asdict(self) | {"met": self.met}


@dataclass(frozen=True)
class Setting:
    """engine: the fast one; repeats: rounds of a race; small: leave out what takes minutes."""

    engine: str
    repeats: int
    small: bool

    @property
    def fast(self) -> bool:
        return self.engine == "amx"

    def goal(self, value: float) -> float | None:
        """A goal set for AMX; other engines are measured without one."""
        return value if self.fast else None


def _nothing_selected(problem: Index) -> Index:
    """The same scores with a top-k of one: as little selection as there can be."""
    other = Index(problem.rows, 1024, problem.heads, topk=1)
    other.tokens, other.keys, other.scales, other.query, other.weights = (
        problem.tokens, problem.keys, problem.scales, problem.query, problem.weights,
    )  # fmt: skip
    return other


def scoring(s: Setting) -> Iterator[Row]:
    """Score alone and score + select, 64 and 32 heads, 4k to 1M."""
    p = Reference()
    sizes = ((128, 4096, 0.7), (64, 32768, 0.85)) + (() if s.small else ((64, 1 << 20, 0.95),))
    for heads in (64, 32):
        for rows, tokens, goal in sizes:
            problem = Index(rows, tokens, heads)
            contestants: dict[str, Callable[[], object]] = {"P": p, "select": problem.bound(s.engine)}
            if tokens == 32768:
                contestants["score"] = _nothing_selected(problem).bound(s.engine)
            times = race(contestants, s.repeats)
            detail = {"rows": rows, "us per row": times["select"] / rows * 1e6, "P TF/s": Reference.flops / times["P"] / 1e12}
            value = of_p(times, "select", problem.flops)
            yield Row(
                f"score + select, {heads} heads, {tokens} tokens", value, s.goal(goal) if heads == 64 else None, "P", detail
            )
            if "score" in times:
                wanted = 1.0 if heads == 64 else 0.75
                yield Row(
                    f"score, {heads} heads, {tokens} tokens", of_p(times, "score", problem.flops), s.goal(wanted), "P", detail
                )


def other_engines(s: Setting) -> Iterator[Row]:
    """The avx engine against the portable one, and the portable one in P."""
    from palimpsest.kernels.detect import available_engines

    rows = 64
    p, problem = Reference(), Index(rows, 32768, 64)
    names = [name for name in ("avx", "portable") if name in available_engines()]
    times = race({"P": p} | {name: problem.bound(name) for name in names}, 5)
    detail = {"us per row": {name: times[name] / rows * 1e6 for name in names}}
    yield Row("portable score + select, 64 heads, 32768 tokens", of_p(times, "portable", problem.flops), 0.17, "P", detail)
    if "avx" in names:
        from palimpsest.kernels.index_select.avx import CHOSEN

        detail = detail | {"avx kernel": CHOSEN}
        yield Row("avx over portable, score + select", times["portable"] / times["avx"], 2.0, "x", detail)
        goal = 0.65 if CHOSEN == "VDPBF16PS" else None
        yield Row("avx score + select, 64 heads, 32768 tokens", of_p(times, "avx", problem.flops), goal, "P", detail)


def selection(s: Setting) -> Iterator[Row]:
    """Selection alone, one head of one dim, so that scoring is next to nothing, against torch.topk and np.partition of ready
    scores."""
    k = 2048
    for tokens in (4096, 32768, 131072) + (() if s.small else (1 << 20,)):
        problem, floor = Index(8, tokens, 1, dim=128), Index(8, tokens, 1, topk=1)
        floor.keys, floor.scales, floor.query, floor.weights = problem.keys, problem.scales, problem.query, problem.weights
        scores = torch.randn(8, tokens, generator=torch.Generator().manual_seed(1))
        plain = scores.numpy()

        def by_partition(plain: np.ndarray = plain, tokens: int = tokens) -> None:
            for row in plain:
                cut = np.partition(row, tokens - k)[tokens - k]
                above = np.flatnonzero(row > cut)
                np.sort(np.concatenate([above, np.flatnonzero(row == cut)[: k - len(above)]]))

        times = race(
            {
                "ours": problem.bound(s.engine),
                "floor": floor.bound(s.engine),
                "topk": lambda scores=scores: [torch.topk(row, k, sorted=False) for row in scores],
                "partition": by_partition,
            },
            s.repeats,
        )
        alone = max(times["ours"] - times["floor"], 1e-9)
        detail = {name: value / 8 * 1e6 for name, value in times.items()} | {
            "unit": "us per row",
            "np.partition over ours": times["partition"] / alone,
        }
        goal = s.goal(8.0) if tokens >= 32768 else None
        yield Row(f"select against torch.topk, {tokens} tokens", times["topk"] / alone, goal, "x", detail)


def attention(s: Setting) -> Iterator[Row]:
    """Attention against torch's gather and dense forms, and by union against row by row."""
    for heads, goal in ((8, 2.5), (16, 2.5), (64, None), (128, 1.7)):
        problem = Attention(32, 16384, heads)
        times = race({"ours": problem.bound(s.engine), "torch": problem.torch_gather}, s.repeats)
        detail = {name: value / 32 * 1e6 for name, value in times.items()} | {"unit": "us per row"}
        yield Row(
            f"attention against index_select + bmm, {heads} heads",
            times["torch"] / times["ours"],
            s.goal(goal) if goal else None,
            "x",
            detail,
        )
    for heads, tokens in ((8, 4096), (16, 16384)):
        problem = Attention(32, tokens, heads)
        times = race({"ours": problem.bound(s.engine), "dense": problem.torch_dense}, s.repeats)
        detail = {name: value / 32 * 1e6 for name, value in times.items()} | {"unit": "us per row"}
        yield Row(
            f"attention against dense mask, {heads} heads, {tokens} tokens", times["dense"] / times["ours"], None, "x", detail
        )
    if s.fast:
        for shared in (1.0, 0.95, 0.9):
            problem = Attention(32, 131072, 8, shared)
            times = race({"rows": problem.bound("amx"), "union": problem.bound("amx-union")}, s.repeats)
            distinct = len(np.unique(problem.ids[:16].numpy()))
            detail = {name: value / 32 * 1e6 for name, value in times.items()} | {"unit": "us per row", "distinct ids": distinct}
            goal = s.goal(1.8) if distinct <= 4096 else None
            yield Row(
                f"union over per row, 8 heads, {distinct} distinct ids of 16 rows",
                times["rows"] / times["union"],
                goal,
                "x",
                detail,
            )


def against_transformers(s: Setting) -> Iterator[Row]:
    """Indexer and attention against transformers', the whole sublayer against theirs, and the peak memory of both.

    Indexer and attention: theirs without the projections around them; ours the queries of the indexer, its scores and selection,
    and the attention.
    """
    shapes = [(Shape(256, 4096, 64, 16), 6.0), (Shape(256, 16384, 64, 16), 10.0)]
    if not s.small:
        shapes += [(Shape(128, 16384, 64, 64), 20.0), (Shape(64, 65536, 64, 8), 25.0)]
    for shape, goal in shapes:
        ours, theirs = Ours(shape, s.engine), Theirs(shape)
        times = race({"ours": ours, "theirs": theirs}, 5)
        hot, theirs_hot = sum(ours.split[name] for name in HOT), times["theirs"] - sum(theirs.aside.values())
        detail = {
            "us per row": {name: value / shape.rows * 1e6 for name, value in times.items()},
            "steps us per row": {name: value / shape.rows * 1e6 for name, value in ours.split.items()},
            "their projections us per row": {name: value / shape.rows * 1e6 for name, value in theirs.aside.items()},
        }
        where = f"{shape.tokens} tokens, {shape.index_heads} index heads, {shape.heads} heads, {shape.rows} rows"
        yield Row(f"indexer + attention against transformers, {where}", theirs_hot / hot, s.goal(goal), "x", detail)
        yield Row(f"whole sublayer against transformers, {where}", times["theirs"] / times["ours"], None, "x", detail)
        peaks = {"ours": peak_of(ours), "theirs": peak_of(theirs)}
        yield Row(f"resident growth, {where}", peaks["ours"], 1.0, "MiB", {"transformers": peaks["theirs"]}, at_most=True)


def memory(s: Setting) -> Iterator[Row]:
    """Scratch of the hot ops; it knows no history length."""
    for name, bound in (
        ("index_select, 64 heads", Index(64, 2048, 64).bound(s.engine)),
        ("sparse_attend, 16 heads", Attention(1, 4096, 16).bound(s.engine)),
        ("sparse_attend, 128 heads", Attention(1, 4096, 128).bound(s.engine)),
    ):
        yield Row(f"scratch of {name}", bound.scratch / 2**20, s.goal(4.0), "MiB", at_most=True)


def threads(s: Setting) -> Iterator[Row]:
    """Two threads at once on halves of the rows: one thread's CPU time over the longer half's."""
    problem = Index(128, 32768, 64)
    whole, halves = problem.bound(s.engine), [problem.bound(s.engine, rows=slice(i * 64, i * 64 + 64)) for i in range(2)]
    one = race({"whole": whole}, s.repeats)["whole"]
    best = float("inf")
    for _ in range(max(5, s.repeats)):
        spent = [0.0, 0.0]

        def work(i: int, spent: list[float] = spent) -> None:
            start = time.thread_time()
            halves[i]()
            spent[i] = time.thread_time() - start

        both = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        best = min(best, max(spent))
    yield Row("two threads over one, CPU time per thread", one / best, s.goal(1.8), "x", {"one s": one, "longer half s": best})


def growth(s: Setting) -> Iterator[Row]:
    """How the cost of a row grows with the history: the slope of log time over log tokens."""
    tokens = (4096, 16384, 65536, 262144) + (() if s.small else (1 << 20,))
    index, attend = [], []
    for n in tokens:
        times = race({"index": Index(64, n, 64).bound(s.engine), "attend": Attention(16, n, 8).bound(s.engine)}, 5)
        index.append(times["index"] / 64)
        attend.append(times["attend"] / 16)
    for name, values in (("index_select", index), ("sparse_attend", attend)):
        slope = float(np.polyfit(np.log(tokens), np.log(values), 1)[0])
        detail = {f"us per row at {n}": value * 1e6 for n, value in zip(tokens, values, strict=True)}
        yield Row(f"growth exponent of {name}, {tokens[0]} to {tokens[-1]} tokens", slope, None, "", detail)


GROUPS = {
    "scoring": scoring, "other-engines": other_engines, "selection": selection, "attention": attention, "transformers":
    against_transformers,
    "memory": memory, "threads": threads, "growth": growth,
}  # fmt: skip
