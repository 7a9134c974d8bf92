"""What the judges of a selection (gates K1 to K6) are asked, what they say of a row, and what they count."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palimpsest.prove.bounds import Arithmetic
from palimpsest.prove.density import Density


@dataclass(frozen=True)
class IndexFacts:
    """The indexer's numbers: ``format`` of its records, tokens per page, ranks, first id past the alias end."""

    topk: int
    heads: int
    dim: int
    format: str
    page: int
    ranks: int
    alias_end: int
    model: Arithmetic


@dataclass
class Counters:
    """What a case must show (gates K6, V3), over the rows of one rank."""

    tie_rows: int = 0
    sides: int = 0
    shards: int = 0
    zero_rows: int = 0
    pads: int = 0
    seen: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "tie_rows": self.tie_rows, "sides": self.sides, "shards": self.shards, "zero_rows": self.zero_rows, "pads": self.pads,
            "seen": sorted(self.seen), "missed": sorted(self.missed),
        }  # fmt: skip


def total(parts: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The counters of all ranks together: ``boundary`` is how many planted records some row saw and no row missed."""
    seen = {i for p in parts for i in p["seen"]}
    missed = {i for p in parts for i in p["missed"]}
    return {
        "tie_rows": sum(p["tie_rows"] for p in parts),
        "sides": max(p["sides"] for p in parts),
        "shards": max(p["shards"] for p in parts),
        "zero_rows": sum(p["zero_rows"] for p in parts),
        "pads": sum(p["pads"] for p in parts),
        "boundary": len(seen - missed),
    }


@dataclass(frozen=True)
class Plan:
    """What is asked of one replay: chunk rows to audit and lattice rows of this slice, the all-zero row, planted ids.

    base_ids: local ids [slots, topk] of the base arrangement when this is the other one
    """

    audited: frozenset[int]
    lattice: frozenset[int]
    zero_row: int
    planted: tuple[int, ...]
    base_ids: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class TieCount:
    """What a lattice row showed: a tie at the cutoff (sides of the alias end and shards it spans), only zeros, planted ids."""

    tied: bool = False
    sides: int = 0
    shards: int = 0
    zero: bool = False
    seen: frozenset[int] = frozenset()
    missed: frozenset[int] = frozenset()


@dataclass
class Verdict:
    """What was found of one row: the first fault of each gate that looked (None: it did not), and what they counted.

    off: K3's largest |ranked - exact| / allowed
    """

    valid: str = ""
    lattice: str | None = None
    truth: str | None = None
    off: float = 0.0
    ties: TieCount | None = None
    density: Density = field(default_factory=Density)

    @property
    def good(self) -> bool:
        return not (self.valid or self.lattice or self.truth)
