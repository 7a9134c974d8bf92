"""The verifier's own table: which cells a record must hold, and how many units each must have checked.

Written from the case definitions, not from the qualifier: the two must agree on every number or a record is refused. Symbols as
in the case
table: T tokens, R rows, W ranks, S rows of a rank's slice, K top-k, P page, H history, a active rows.
"""

from typing import Any

from palimpsest.core.errors import EvidenceError

_SEAL = "seal"
_ARRANGEMENTS = 2
_LATTICE = ("C03", "C05", "C09", "C11")
_MIXED = ("C01",)
#: segments whose digests X6 compares: the caller's rows, the weights, the tables
_INPUTS = 3
#: places where S6 compares the complement of the write set: before the latent gather, and at the end
_CHECKPOINTS = 2
#: conditions of K6: tie rows, sides of the alias end, shards, zero rows
_TIE_CONDITIONS = 4
#: context lengths of A5, replays of their own under the lock, replays of the soak, conditions of A4
_LENGTHS = (4096, 65_536, 1 << 20)
_LOCKED = 2
_SOAK = 100
_CAP = 3
#: foreign op -> gates that cannot judge it; every other foreign op must write the engine's bytes (B1)
_WITHOUT = {"index_select": ("K2", "K3", "K5"), "sparse_attend": ("O3", "O5")}
#: arithmetics whose attention oracle B can follow; for the others O3 is absent
_ENCLOSED = ("portable-1", "avx-1")
#: ops with steps of other names
_STEPS = {"gather_history": ["gather_index", "gather_latent"]}


def case_ids() -> list[str]:
    """C01 .. C11."""
    return [f"C{n:02d}" for n in range(1, 12)]


def absent_gates(record: dict[str, Any]) -> list[str]:
    """What a record must list as absent: O3 where its engine's attention cannot be followed, V4 without a self-test."""
    enclosed = record["numerics"].get("name") in _ENCLOSED
    return [*(() if enclosed else ("O3",)), *(() if record["self_test"] is not None else ("V4",))]


class Table:
    """Expectations of one record, from its limits, facts and case list alone."""

    def __init__(self, record: dict[str, Any]):
        self.record = record
        limits, facts = record["limits"], record["facts"]
        self.t, self.r, self.w, self.p = limits["tokens"], limits["rows"], limits["ranks"], limits["page"]
        self.k, self.s = _whole(facts, "topk"), -(-self.r // self.w)
        self.rank_pages = -(-(self.t // self.p) // self.w)
        self.features = _whole(record["geometry"], "kv_lora") * (_whole(record["geometry"], "heads") // self.w)
        self.views = len(record["plan"]["base"]["views"]) + len(record["plan"]["alias"]["views"])

    def sizes(self) -> dict[str, list[tuple[int, int]]]:
        """Case -> (H, a) of each of its replays."""
        t, r, s, k = self.t, self.r, self.s, self.k
        ragged = -(-1000 * r // 4096)
        ragged = max(1, ragged - 1 if ragged % s == 0 else ragged)
        middle = k + 1 if k < r else r // 2 + 1
        shrinking = sorted({a for a in (r, middle, s + 1, s, s - 1, 1, 0) if a <= r}, reverse=True)
        limit = (t - r, r)
        return {
            "C01": [(0, r) if k < r else (k - r // 2, r)],
            "C02": [(t // 2, r)],
            "C03": [limit],
            "C04": [(t - r + 1, r - 1)],
            "C05": [(t // 8 - 1, 9 * self.w // 16 * s + 1)],
            "C06": [(k - 1, 1)],
            "C07": [(t * 667573 // 1000000 | 1, 0)],
            "C08": [(t // 4 - 1, a) for a in shrinking],
            "C09": [limit],
            "C10": [(t // 16 + 1, ragged)],
            "C11": [limit],
        }

    def check_case_sizes(self) -> None:
        """The recorded cases have the sizes, regimes, audited rows and pad counts that their definitions give. Raises
        EvidenceError.
        """
        sizes = self.sizes()
        for case in self.record["cases"]:
            name = case["id"]
            found = [(step["history"], step["rows"]) for step in case["steps"]]
            _require(found == sizes[name], f"{name} ran with (history, rows) {found}, its definition gives {sizes[name]}")
            for step in case["steps"]:
                wanted = self._regime(name, step["rows"])
                _require(step["regime"] == wanted, f"{name} has {step['regime']} rows, its definition says {wanted}")
                self._check_audited(name, step)
            pads = sum(self.r * self.k - sum(min(self.k, h + j + 1) for j in range(a)) for h, a in sizes[name])
            declared = case["minima"].get("pads", 0)
            _require(declared == pads, f"{name} declares {declared} pad slots, its rows leave {pads}")

    def _regime(self, case: str, rows: int) -> str:
        if not rows:
            return "none"
        return "lattice" if case in _LATTICE else "mixed" if case in _MIXED else "natural"

    def _check_audited(self, case: str, step: dict[str, Any]) -> None:
        rows, audited = step["rows"], step["audited"]
        _require(audited == sorted(set(audited)), f"{case} lists audited rows out of order or twice")
        _require(all(row < rows for row in audited), f"{case} audits row {max(audited, default=0)} of {rows} active rows")
        for rank in range(self.w):
            first, count = rank * self.s, self._own(rank, rows)
            ends = {first, first + count - 1} if count else set()
            _require(ends <= set(audited), f"{case} does not audit the ends of rank {rank}'s slice, rows {sorted(ends)}")

    def _own(self, rank: int, rows: int) -> int:
        """Active rows in a rank's slice."""
        return max(0, min(self.s, rows - rank * self.s))

    def cells(self) -> dict[tuple[str, int, str], int]:
        """(case, rank, gate) -> units that must have been checked. Gates with nothing to check in a case have no cell there."""
        found: dict[tuple[str, int, str], int] = {}
        for rank in range(self.w):
            found |= {(_SEAL, rank, gate): count for gate, count in self._seal(rank).items() if count}
            for case in self.record["cases"]:
                units = {gate: n for gate, n in self._exchanged(case, rank, self._case(case, rank)).items() if n}
                units["V1"] = len(units)
                found |= {(case["id"], rank, gate): n for gate, n in units.items()}
        return found

    def _exchanged(self, case: dict[str, Any], rank: int, units: dict[str, int]) -> dict[str, int]:
        """The units once gates that need our own kernels gave way to those that judge foreign ones."""
        steps, compared = case["steps"], 0
        for kernel in self.record["kernels"]:
            op = kernel["op"]
            _require(
                op != "barrier" and kernel["steps"] == _STEPS.get(op, [op]),
                f"record.json says {op} ran in steps {kernel['steps']}",
            )
            for gate in _WITHOUT.get(op, ()):
                units.pop(gate, None)
            compared += len(kernel["steps"]) if op not in _WITHOUT else 0
            if op == "index_select":
                units["K7"] = _ARRANGEMENTS * sum(self._own(rank, step["rows"]) for step in steps)
        return units | {"B1": _ARRANGEMENTS * len(steps) * compared}

    def _seal(self, rank: int) -> dict[str, int]:
        pairs, segments = 0, 0
        for plan in self.record["plan"].values():
            segments += len(plan["segments"])
            for kind in plan["segments"]:
                n = sum(view["segment"] == kind for view in plan["views"].values())
                pairs += n * (n - 1) // 2
        files = len(range(rank, _whole(self.record["lint"], "files"), self.w))
        once = {"S1": self.views, "S2": self.views, "S3": pairs, "A1": 2, "A2": segments + 1, "V5": files}
        return once | self._prepared(rank) | dict.fromkeys(("L1", "L2", "L3", "L4"), 1)

    def _prepared(self, rank: int) -> dict[str, int]:
        """Gates on prepared memory and on replays of their own: locked and shadowed ones, a probed one, a soak under a cap."""
        plans, schedule = self.record["plan"], self.record["schedule"]
        views = [view for plan in plans.values() for view in plan["views"].values() if view["bytes"]]
        shared = sum(len(plan["shared"]) for plan in plans.values())
        reusable = {name for name, view in plans["alias"]["views"].items() if view["segment"] == "reusable"}
        touching = sum(len({"index_history", "latent_history"} & {*step["reads"], *step["writes"]}) for step in schedule)
        lengths = sum(tokens >= 4 * self.k for tokens in _LENGTHS)
        probed = next(case for case in self.record["cases"] if case["id"] == "C03")["steps"][0]
        return {
            "S7": shared + _LOCKED * (touching + 1),
            "S8": _LOCKED * sum(name in reusable for step in schedule for name in step["reads"]),
            "S9": len(views) + shared,
            "S10": sum(view["segment"] in ("staging", "table", "signal") for view in views),
            "A4": _CAP,
            "A5": lengths * (3 + len(plans["alias"]["segments"])) if rank == 0 else 0,
            "A6": _SOAK + 1,
            "O4": len(probed["audited"]) * self.features,
            "V4": 1 if rank == 0 and self.record["self_test"] is not None else 0,
        }

    def _ordered(self) -> int:
        """Orderings of S7 in one replay of both arrangements: own pairs, the histories rank by rank, joining steps."""
        joins = sum(step["scope"] == "all" for step in self.record["schedule"])
        histories = ["index_history", "latent_history"]
        return sum(
            len(plan["shared"]) + (self.w - 1) * (histories in plan["shared"]) + joins for plan in self.record["plan"].values()
        )

    def _case(self, case: dict[str, Any], rank: int) -> dict[str, int]:
        steps = case["steps"]
        n, both = len(steps), _ARRANGEMENTS
        active = sum(step["rows"] for step in steps)
        own = sum(self._own(rank, step["rows"]) for step in steps)
        pages = n * 2 * self.rank_pages
        audited = [(step, row) for step in steps for row in step["audited"]]
        mine = [(step, row) for step, row in audited if row // self.s == rank]
        tokens = sum(2 * (step["history"] + step["rows"]) + self.r for step in steps)
        again = both if case["id"] == "C11" else 0
        return {
            "S4": n * 2 * self.views,
            "S7": n * self._ordered(),
            "O3": len(mine) * self.features if self.record["numerics"].get("name") in _ENCLOSED else 0,
            "O5": len(mine),
            "S5": both * pages,
            "S6": both * n * _CHECKPOINTS,
            "A3": both * n,
            "X1": pages,
            "X2": own + active,
            "X3": own,
            "X4": both * tokens,
            "X5": both * n * 2 * self.w + self.t // self.p,
            "X6": both * n * _INPUTS,
            "K1": both * (n * self.r + own),
            "K2": (both + 1) * own,
            "K3": both * sum(step["history"] + row + 1 for step, row in mine),
            "K4": own,
            "K5": both * sum(self._lattice(rank, step) for step in steps),
            "K6": _TIE_CONDITIONS if case["minima"].get("tie_rows", 0) else 0,
            "O0": both * len(audited),
            "O1": both * n * self.r + again,
            "O1s": both * sum(step["rows"] > 0 for step in steps),
            "O2": both * len(audited) * self.features,
            "O6": both * active,
            "V2": both * n,
            "V3": sum(value > 0 for value in case["minima"].values()),
        }

    def _lattice(self, rank: int, step: dict[str, Any]) -> int:
        own, first = self._own(rank, step["rows"]), rank * self.s
        if step["regime"] == "mixed":
            zero = 3 * step["rows"] // 4
            return sum(row % 2 == 0 or row == zero for row in range(first, first + own))
        return own if step["regime"] == "lattice" else 0


def _whole(table: dict[str, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int or value < 0:
        raise EvidenceError(f"record.json: {name} is {value!r}, a whole number is wanted")
    return value


def _require(good: bool, message: str) -> None:
    if not good:
        raise EvidenceError(message)
