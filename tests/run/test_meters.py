"""Counters move when something is allocated or mapped, and stay still over replays of a sealed session."""

import mmap

import numpy as np
import pytest
import torch

from palimpsest.run.arena import Segment
from palimpsest.run.meters import changes, counters, heap_bytes, mappings, meter


def test_meter_sees_a_new_mapping_and_its_end() -> None:
    start = counters()
    segment = Segment("staging", 3 * mmap.PAGESIZE)
    segment.window.populate()
    moved = changes(start, counters())
    expected = f"mapping palimpsest-staging of {3 * mmap.PAGESIZE} bytes, rw-s, is new"
    assert [line for line in moved if "is new" in line] == [expected]
    assert any("pss" in line for line in moved)
    segment.window.release()
    assert [line for line in changes(start, counters()) if "mapping" in line] == []


def test_mappings_of_another_smaps_text(tmp_path) -> None:
    text = (
        "7f0000000000-7f0000002000 rw-s 00000000 00:01 77    /memfd:palimpsest-table (deleted)\n"
        "Size: 8 kB\nRss: 8 kB\nPss: 4 kB\nPss_Dirty: 4 kB\n"
        "7f0000002000-7f0000003000 ---p 00000000 00:00 0 \nRss: 4 kB\nPss: 4 kB\n"
        "7f0000004000-7f0000005000 rw-s 00000000 00:01 78    /memfd:other (deleted)\nPss: 4 kB\n"
    )
    (tmp_path / "smaps").write_text(text)
    (found,) = mappings(smaps=str(tmp_path / "smaps"))
    assert (found.name, found.inode, found.nbytes, found.pss, found.rss) == ("palimpsest-table", 77, 8192, 4096, 8192)
    assert mappings([78], smaps=str(tmp_path / "smaps")) == []


def test_traced_peak_sees_a_hidden_temporary_and_not_an_out_argument() -> None:
    a, b, out = (np.ones(1 << 18, np.float32) for _ in range(3))
    with meter(traced=True) as quiet:
        np.add(a, b, out=out)
    with meter(traced=True) as loud:
        out[:] = a + b
    assert loud.traced_peak >= 1 << 20
    assert quiet.traced_peak < 1 << 20
    assert loud.after.numpy_live == loud.before.numpy_live
    with meter(traced=True) as kept:
        c = a + b
    assert kept.after.numpy_live - kept.before.numpy_live == c.nbytes
    assert any("numpy_live" in line for line in kept.changes())


def test_torch_peak_sees_a_hidden_temporary() -> None:
    x, y = torch.ones(1 << 18), torch.ones(1 << 18)
    with meter(torch_memory=True) as quiet:
        torch.add(x, y, out=y)
    with meter(torch_memory=True) as loud:
        y.copy_((x + y) * 2)
    assert (quiet.torch_total, quiet.torch_peak, quiet.torch_largest) == (0, 0, 0)
    assert loud.torch_total == 2 << 20
    assert loud.torch_peak == 2 << 20
    assert loud.torch_largest == 1 << 20


def test_heap_counter_sees_a_large_malloc() -> None:
    if heap_bytes() is None:
        pytest.skip("no glibc here")
    before = heap_bytes()[0]
    keep = torch.empty(64 << 20, dtype=torch.uint8)
    assert heap_bytes()[0] - before >= 64 << 20
    del keep
    assert heap_bytes()[0] == before


@pytest.mark.parametrize("guard", [False, True])
def test_a_sealed_session_moves_no_counter(toy, guard: bool) -> None:
    def main(session):
        hidden = torch.randn(16, toy.WIDTH)
        for history, rows in ((1008, 16), (0, 0), (3, 1), (63, 7)) * 25:
            session.prefill(hidden, history, rows=rows, guard=guard)
        return changes(session.at_seal, counters(session.arena))

    assert toy.run(main) == []


def test_a_sealed_replay_allocates_no_torch_memory(toy) -> None:
    def main(session):
        hidden = torch.randn(16, toy.WIDTH)
        with meter(session.arena, traced=True, torch_memory=True) as reading:
            session.prefill(hidden, 1000)
        return reading

    reading = toy.run(main)
    assert reading.torch_total == 0
    assert reading.changes() == []


def test_the_meter_finds_a_kernel_that_allocates(toy) -> None:
    def attend(call, chunk):
        call.view("output")[: chunk.rows].copy_(call.view("hidden")[: chunk.rows] + 1.0)

    def main(session):
        hidden = torch.randn(16, toy.WIDTH)
        with meter(session.arena, torch_memory=True) as reading:
            session.prefill(hidden, 1000)
        return reading

    assert toy.run(main, ops={"toy_attend": attend}).torch_largest == 16 * toy.WIDTH * 4
