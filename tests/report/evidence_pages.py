"""A small made-up record, enough for every part of the report. The tests of the real thing make theirs by a qualification."""

from pathlib import Path
from typing import Any

from palimpsest.prove.verify import Verified
from palimpsest.report import qualify_html

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></style><script>document.title='owned'</script>{{ 7 * 7 }}"
MIB = 1 << 20
STEPS = ["bind_inputs", "append_index", "gather_index", "index_select", "gather_latent", "sparse_attend", "project_output"]


def _view(segment: str, offset: int, nbytes: int, first: int, last: int) -> dict[str, Any]:
    return {"segment": segment, "offset": offset, "bytes": nbytes, "align": 64, "steps": [first, last]}


def _plan(index: int, peak: int) -> dict[str, Any]:
    views = {
        "index_history": _view("reusable", index, 132 * MIB, 3, 4),
        "latent_history": _view("reusable", 0, 576 * MIB, 5, 6),
        "hidden": _view("reusable", 600 * MIB, 8 * MIB, 1, 7),
        "sparse_attend.scratch": _view("reusable", 576 * MIB, 20 * MIB, 6, 6),
        "w.q_a": _view("weights", 0, MIB, 0, 8),
    }
    return {"digest": "ab" * 32, "logical": peak, "segments": {"reusable": peak, "weights": MIB}, "views": views, "shared": []}


def _flag(case: str, rank: int, gate: str, verdict: str = "PASS") -> dict[str, Any]:
    failure = None if verdict == "PASS" else "base replay 0 row 0: a planted failure"
    return {
        "case": case,
        "rank": rank,
        "gate": gate,
        "verdict": verdict,
        "n_expected": 12,
        "n_checked": 12,
        "n_bytes": 4096,
        "worst": None,
        "first_failure": failure,
    }


def example() -> dict[str, Any]:
    """``{"record": ..., "flags": ..., "ties": ...}`` of a run of two ranks and two cases, in which one cell failed."""
    cases = [
        {
            "id": name,
            "name": said,
            "regime": "natural",
            "poison": ["Pn"],
            "steps": [{"history": 8, "rows": 16, "regime": "natural", "audited": [0]}],
            "minima": {},
            "planted": [],
            "verdict": "PASS",
            "start_ns": 0,
            "end_ns": 1,
        }
        for name, said in (("C01", "cold full"), ("C02", "mid full"))
    ]
    flags = [_flag("seal", rank, "S1") for rank in (0, 1)]
    flags += [
        _flag(case, rank, gate, "FAIL" if (case, rank, gate) == ("C01", 1, "K7") else "PASS")
        for case in ("C01", "C02")
        for rank in (0, 1)
        for gate in ("S4", "K4", "K7", "V1")
    ]
    entry = {"id": 3, "mantissa": 5, "exponent": -3, "sha256": "00" * 32, "bits": "", "class": "exact_tie"}
    certificate = {
        "row": 7,
        "rank": 0,
        "visible": 16,
        "above": 3,
        "equal": 9,
        "needed": 5,
        "kth": entry,
        "members": [entry, entry],
    }
    zero = dict.fromkeys(("rows_compared", "rows_changed", "exact_tie", "rounded_tie", "rows_reordered", "rows_selecting"), 0)
    density = dict.fromkeys(("members", "needed", "of", "pairs", "rows", "selecting", "shared", "tied", "zero_tied"), 3)
    record = {
        "run_id": "0123456789ab",
        "started_utc": "20260101T000000Z",
        "claim": "The planned reuse of memory in layer 3 of tiny-k31 is exact.",
        "non_claims": ["not: speed", "not: other layers"],
        "gates_absent": [],
        "gates_verdict": "FAIL",
        "verdict": "FAIL",
        "failure": None,
        "checkpoint": {
            "name": "tiny-k31",
            "layer": 3,
            "synthetic": True,
            "files": [{"name": "config.json", "bytes": 10, "sha256": "0" * 64}],
        },
        "limits": {"tokens": MIB, "rows": 4096, "ranks": 2, "page": 64},
        "profile": "small",
        "engine": "portable",
        "seeds": {"master": 1},
        "kernels": [
            {
                "op": "index_select",
                "name": "mine:select",
                "form": "plain",
                "file": "mine.py",
                "sha256": "1" * 64,
                "steps": ["index_select"],
                "gates_without": ["K2"],
                "gates_extra": ["K7"],
                "because": "its scores are unknown",
            }
        ],
        "cases": cases,
        "steps": STEPS,
        "plan": {"base": _plan(608 * MIB, 740 * MIB), "alias": _plan(0, 608 * MIB)},
        "allocation": {
            "logical_base": 740 * MIB,
            "logical_alias": 608 * MIB,
            "logical_difference": 132 * MIB,
            "mapped_base": {"reusable": 740 * MIB},
            "mapped_alias": {"reusable": 608 * MIB},
            "pss_base": 740 * MIB,
            "pss_alias": 608 * MIB,
        },
        "bytes": {"base_index_offset": 608 * MIB, "alias_index_offset": 0, "alias_latent_offset": 0, "index_history": 132 * MIB},
        "selection": zero,
        "output": {"tail_rows": 5, "worst_over_bound": "0x1.8p-1"},
        "sparse": {"layers": [3], "rows_selecting": 32},
        "density": {"C01": density},
        "power": {"C01": {"tried": 4, "O2": 3, "O3": 4, "coordinates": 8, "unique": 6}},
        "elapsed_ns": {"total": 9_000_000_000, "C01": 4_000_000_000, "C02": 2_000_000_000},
        "argv": ["qualify"],
        "source": {"kind": "git", "commit": "abc", "dirty": False, "package_digest": "2" * 64},
        "self_test": None,
        "previous": None,
        "machine": {"cpu": "a processor"},
        "libraries": {"torch": {"version": "2", "sha256": None}},
        "numerics": {"name": "portable-1"},
    }
    return {
        "record": record,
        "flags": flags,
        "ties": [{"case": "C01", "replay": 0, "between": ["base", "alias"], "certificate": certificate, "records": {}}],
    }


def page_of(folder: Path, tree: dict[str, Any]) -> Path:
    """The page of a made-up record, written where the browser can read it."""
    found = Verified(
        folder="evidence",
        run_id=tree["record"]["run_id"],
        verdict="FAIL",
        gates_verdict="FAIL",
        cells=len(tree["flags"]),
        certificates=1,
        failures=(),
        plan_digest="",
        gates_absent=(),
        **_later(),
    )
    path = folder / "report.html"
    path.write_text(qualify_html.render(found, tree["record"], tree["flags"], tree["ties"], "20260101T000000Z-0123456789ab"))
    return path


def _later() -> dict[str, Any]:
    """Fields of ``Verified`` that this file does not care about."""
    import dataclasses

    known = {"folder", "run_id", "verdict", "gates_verdict", "cells", "certificates", "failures", "plan_digest", "gates_absent"}
    return {f.name: None for f in dataclasses.fields(Verified) if f.name not in known and f.default is dataclasses.MISSING}
