"""Shadow, probes, soak and round trip on a small sealed layer, each shown to fail."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import TINY, job

from palimpsest.kernels.call import Call, Chunk, Implementation
from palimpsest.prove import capacity, roundtrip
from palimpsest.prove.dedicated import Dedicated
from palimpsest.prove.gates import SEAL, Sheet
from palimpsest.prove.oracle import LatentFormat
from palimpsest.prove.probes import Probe
from palimpsest.prove.rank_setup import Setup
from palimpsest.ranks.comm import Comm
from palimpsest.ranks.local import run_local
from palimpsest.run.bind import default_implementations
from palimpsest.run.execute import Session, prepare

Part = Callable[[Dedicated], None]


def judged(tmp_path: Path, part: Part, spoil: Callable[[str, Implementation], Implementation] | None = None) -> dict[str, Any]:
    """Gate -> rank 1's flag after one part of the replays of their own."""
    setup = Setup(job(tmp_path))

    def main(comm: Comm) -> list[dict[str, Any]]:
        known = default_implementations(setup.program, "portable")
        bound = {op: spoil(op, run) for op, run in known.items()} if spoil else known
        sheet = Sheet(SEAL, comm.rank)
        with prepare(setup.program, setup.plans["alias"], comm=comm, fill=setup.filler(), implementations=bound) as session:
            part(Dedicated(setup, session, comm, sheet))
        return sheet.close()

    return {flag["gate"]: flag for flag in run_local(TINY.ranks, main)[1]}


def after(op: str, change: Callable[[Call, Chunk], None]) -> Callable[[str, Implementation], Implementation]:
    """Changes what one op wrote, in full chunks at the limit."""

    def spoil(name: str, inner: Implementation) -> Implementation:
        def run(call: Call, chunk: Chunk) -> None:
            inner(call, chunk)
            if name == op and chunk.rows == TINY.rows:
                change(call, chunk)

        return run if name == op else inner

    return spoil


def skip_last_tile(call: Call, chunk: Chunk) -> None:
    """The producer leaves its last tokens as they were: poison."""
    if call.name == "gather_index":
        call.view("history", "keys")[chunk.visible - 3 : chunk.visible].view(torch.uint8).fill_(0x7F)


def index_bytes_stay(call: Call, chunk: Chunk) -> None:
    if call.name == "gather_latent":
        call.view("history")[:4].fill_(0x7F)


def test_healthy_replays_pass_under_lock_and_shadow(tmp_path: Path) -> None:
    flags = judged(tmp_path, lambda d: d._locked())
    assert {gate: flag["verdict"] for gate, flag in flags.items()} == {"S7": "PASS", "S8": "PASS"}
    assert flags["S8"]["n_checked"] > 0


@pytest.mark.parametrize("change", [skip_last_tile, index_bytes_stay])
def test_bytes_that_nobody_wrote_fail_the_shadow(tmp_path: Path, change: Callable[[Call, Chunk], None]) -> None:
    flag = judged(tmp_path, lambda d: d._locked(), after("gather_history", change))["S8"]
    assert flag["verdict"] == "FAIL"
    assert "which nobody wrote since they were poisoned" in flag["first_failure"]


def replace_last(call: Call, chunk: Chunk) -> None:
    ids, counts = call.view("ids"), call.view("counts")
    for row in range(chunk.rows):
        chosen = set(ids[row, : counts[row]].tolist())
        ids[row, counts[row] - 1] = next(i for i in range(chunk.history) if i not in chosen)


def wrong_record(inner: Implementation) -> Implementation:
    """Attention reads another record than the id names, for the last id of each row: ids and counts stay right."""

    def run(call: Call, chunk: Chunk) -> None:
        kept = call.view("ids").clone()
        if chunk.rows == TINY.rows:
            replace_last(call, chunk)
        inner(call, chunk)
        call.view("ids").copy_(kept)

    return run


def test_probes_pass_and_betray_one_wrong_record(tmp_path: Path) -> None:
    assert judged(tmp_path, lambda d: d._probed())["O4"]["verdict"] == "PASS"
    flag = judged(tmp_path, lambda d: d._probed(), lambda op, run: wrong_record(run) if op == "sparse_attend" else run)["O4"]
    assert flag["verdict"] == "FAIL"
    assert flag["n_checked"] == flag["n_expected"]


@pytest.mark.parametrize("kind", ["fp8", "fp8_ds_mla", "bf16", "fp32"])
def test_a_probe_record_holds_its_signs(kind: str) -> None:
    from palimpsest.prove.oracle import decode_latent

    layout = LatentFormat(kind, 128, 64, 2.0 if kind == "fp8" else 1.0)
    probe = Probe(3, layout, 5, 0.1)
    values, dequant = decode_latent(probe.records(0, 9), layout)
    ids = np.arange(9)
    assert dequant == 0
    assert np.array_equal(values[:, :128], probe.signs(ids) * layout.scale)
    assert np.array_equal(values[:, 0] > 0, ids % 2 == 0)
    assert np.array_equal(values[:, 1] > 0, ids < 5)
    assert not values[:, 128:].any()


def test_a_scale_that_is_no_power_of_two_has_no_exact_probe() -> None:
    assert not Probe(1, LatentFormat("fp8", 128, 0, 0.3), 0, 0.1).usable


# -- soak


def test_a_soak_passes(tmp_path: Path) -> None:
    flags = judged(tmp_path, lambda d: d._soak())
    assert {gate: flag["verdict"] for gate, flag in flags.items()} == {"A4": "PASS", "A6": "PASS"}
    assert flags["A6"]["n_checked"] == 101


def test_growth_in_every_window_is_a_leak_and_growth_in_some_is_not() -> None:
    least = 25 * capacity.LEAK_BYTES
    assert capacity.leak([25 * 1024] * 4, 25)
    assert capacity.leak([least] * 4, 25)
    assert not capacity.leak([least, least - 1, least, least], 25)
    assert not capacity.leak([least, None, least, least], 25)


def test_a_late_allocation_fails_under_the_cap_only() -> None:
    cap = capacity.Cap(1 << 20)
    with cap:
        assert not capacity.late_mapping(1 << 30)
    assert capacity.late_mapping(1 << 30)


class Fixed:
    """Stands in for an arena in a soak of nothing."""


def test_a_mapping_that_a_replay_leaves_behind_fails_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: Iterator[int] = iter(range(100))
    monkeypatch.setattr(capacity, "counters", lambda arena: capacity_counters(next(readings)))
    monkeypatch.setattr(capacity, "largest", lambda arena: 1 << 30)
    sheet = Sheet(SEAL, 0)
    capacity.Soak(Fixed(), lambda n: None, lambda label: None, 1, True, False).run(sheet)  # type: ignore[arg-type]
    assert sheet.cell("A6").verdict == "FAIL"
    assert "heap_large" in str(sheet.cell("A6").first_failure)
    assert sheet.cell("A4").verdict == "PASS"


def capacity_counters(number: int) -> Any:
    from palimpsest.run.meters import Counters

    return Counters((), 0, number * 4096, 1000)


# -- capacity law, round trip, independence


def test_the_capacity_law_holds_and_a_longer_index_record_breaks_it(tmp_path: Path) -> None:
    setup = Setup(job(tmp_path))
    for record, verdict in ((132, "PASS"), (133, "FAIL")):
        sheet = Sheet(SEAL, 0)
        capacity.law(sheet, setup.program, setup.plans, records=(record, setup.record_bytes["latent_cache"]))
        assert sheet.cell("A5").verdict == verdict
        assert sheet.cell("A5").n_checked == capacity.law_units(len(setup.plans["alias"].segments))


def with_session(tmp_path: Path, use: Callable[[Session], Any]) -> Any:
    setup = Setup(job(tmp_path))

    def main(comm: Comm) -> Any:
        with prepare(setup.program, setup.plans["alias"], comm=comm, fill=setup.filler()) as session:
            return use(session) if comm.rank == 0 else None

    return run_local(TINY.ranks, main)[0]


def test_views_survive_a_fresh_process_and_a_copy_of_one_does_not(tmp_path: Path) -> None:
    def use(session: Session) -> tuple[str, str, str]:
        arena = session.arena
        before = arena.segment("reusable").clone()
        asked = roundtrip.describe(arena)
        verdicts = []
        for damage in ("none", "copied", "moved"):
            answer = roundtrip.ask(asked)
            if damage == "moved":
                answer["views"]["query"]["offset"] += 64
            if damage == "copied":
                # the index views get an allocation of their own, as a worker that deep-copies views would give them
                asked["arenas"]["copy"] = {"fd": arena.fd("staging")}
                copied = {
                    **asked,
                    "views": {
                        **asked["views"],
                        "index_history": {**asked["views"]["index_history"], "arena": "copy", "offset": 0},
                    },
                }
                answer = roundtrip.ask(copied)
                del asked["arenas"]["copy"]
            sheet = Sheet(SEAL, 0)
            roundtrip.compare(sheet, arena, answer, "alias")
            verdicts.append(sheet.cell("S9").verdict)
        assert torch.equal(before, arena.segment("reusable"))
        return tuple(verdicts)  # type: ignore[return-value]

    assert with_session(tmp_path, use) == ("PASS", "FAIL", "FAIL")


def test_staging_inside_reusable_memory_fails(tmp_path: Path) -> None:
    def use(session: Session) -> tuple[str, str]:
        arena, found = session.arena, []
        for raw in (arena._raws["staging"], arena.segment("reusable")[:64]):
            arena._raws["staging"] = raw
            sheet = Sheet(SEAL, 0)
            roundtrip.independence(sheet, arena, "alias")
            found.append(sheet.cell("S10").verdict)
        return tuple(found)  # type: ignore[return-value]

    assert with_session(tmp_path, use) == ("PASS", "FAIL")
