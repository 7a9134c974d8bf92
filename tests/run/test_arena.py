"""One mapping per pool: views without copies, exact proportional size, red zones, a second mapping, memory really given back."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from palimpsest.core.errors import Unavailable, UserError
from palimpsest.plan.place import place
from palimpsest.run.arena import PAGE, RED_ZONE, Arena, Segment
from palimpsest.run.meters import arena_mappings, arena_pss, mappings


@pytest.fixture
def arena(toy):
    program = toy.program()
    with_plan = Arena(program, place(program))
    yield with_plan
    with_plan.close()


def test_pss_is_the_planned_bytes_in_whole_pages(arena) -> None:
    pages = {s.kind: -(-s.nbytes // PAGE) * PAGE for s in arena.plan.segments}
    assert arena_pss(arena) == pages
    assert arena.mapped_bytes == sum(pages.values())
    assert arena.logical_bytes == arena.plan.total


def test_arrangements_differ_by_the_index_history(toy) -> None:
    program = toy.program()
    alias, base = place(program), place(program, "off")
    both = [Arena(program, alias), Arena(program, base)]
    assert base.total - alias.total == 132 * program.limits.tokens
    small, large = (arena_pss(a)["reusable"] for a in both)
    assert large - small == 132 * program.limits.tokens  # 1,024 tokens: whole pages
    for a in both:
        a.close()


def test_two_arenas_in_one_process_are_told_apart(arena, toy) -> None:
    other = Arena(arena.program, arena.plan)
    assert arena_pss(other) == arena_pss(arena)
    assert {m.inode for m in arena_mappings(arena)}.isdisjoint(m.inode for m in arena_mappings(other))
    other.close()


def test_views_share_one_storage_and_lie_where_the_plan_says(arena) -> None:
    start = arena.segments["reusable"].window.address
    for buffer in arena.program.all_buffers:
        spot = arena.plan.by_name[buffer.name]
        assert arena.address(buffer.name) % 64 == 0
        for plane in buffer.planes:
            view = arena.view(buffer.name, plane.name)
            assert view.data_ptr() == arena.address(buffer.name) + buffer.plane_offset(plane.name)
            assert view.shape == plane.shape
            assert view.is_contiguous()
            if spot.kind == "reusable":
                assert view.untyped_storage().data_ptr() == start
    assert start % PAGE == 0
    assert arena.view("index_history", "keys") is arena.view("index_history", "keys")
    assert arena.address("index_history") == arena.address("latent_history")


def test_asking_for_a_view_allocates_nothing(arena) -> None:
    first = [arena.view("ids"), arena.raw("ids"), arena.planes("index_history")["scales"]]
    assert [arena.view("ids"), arena.raw("ids"), arena.planes("index_history")["scales"]][0] is first[0]
    assert arena.raw("ids") is first[1]


def test_second_view_is_the_same_pages_at_another_address(arena) -> None:
    before = arena_pss(arena)["reusable"]
    window = arena.second_view("reusable")
    arena.raw("ids").fill_(7)
    spot = arena.plan.by_name["ids"]
    assert torch.equal(window.tensor[spot.offset : spot.stop], arena.raw("ids"))
    assert window.address != arena.segments["reusable"].window.address
    window.populate()
    pss = [m.pss for m in arena_mappings(arena) if m.name.endswith("reusable")]
    rss = [m.rss for m in arena_mappings(arena) if m.name.endswith("reusable")]
    assert sum(pss) == before
    assert sum(rss) == 2 * before  # why resident size is the wrong number
    window.release()
    assert not window.mapped


def test_another_process_can_open_the_memfd(arena) -> None:
    arena.view("w.scale").fill_(3.0)
    with open(f"/proc/{os.getpid()}/fd/{arena.fd('weights')}", "rb") as file:
        assert file.read(4) == torch.tensor([3.0]).view(torch.uint8).numpy().tobytes()


def test_close_unmaps(toy) -> None:
    program = toy.program()
    arena = Arena(program, place(program))
    inodes = [s.inode for s in arena.segments.values()]
    fds = [s.fd for s in arena.segments.values()]
    assert mappings(inodes)
    assert arena.close() == []
    assert mappings(inodes) == []
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)
    assert arena.close() == []
    with pytest.raises(UserError, match="closed"):
        arena.view("ids")


def test_a_held_view_outlives_close_and_takes_its_pages_with_it(toy) -> None:
    program = toy.program()
    arena = Arena(program, place(program))
    inodes = [s.inode for s in arena.segments.values()]
    held = arena.view("output").fill_(5.0)[:2]
    assert arena.close() == ["reusable"]
    assert float(held.sum()) == 5.0 * held.numel()
    assert [m.name for m in mappings(inodes)] == ["palimpsest-reusable"]
    del held
    assert mappings(inodes) == []


def test_slack_is_what_no_buffer_covers(arena) -> None:
    for kind, segment in arena.segments.items():
        covered = bytearray(segment.mapped)
        for spot in arena.plan.places:
            if spot.kind == kind:
                covered[spot.offset : spot.stop] = b"\1" * spot.nbytes
        for start, stop in arena.slack(kind):
            assert not any(covered[start:stop])
            covered[start:stop] = b"\1" * (stop - start)
        assert all(covered)


@pytest.mark.parametrize("where", ["before", "after", "protected"])
def test_red_zones_and_protection_kill(where: str) -> None:
    code = f"""
import ctypes
from palimpsest.run.arena import Segment
window = Segment("reusable", 5000).window
window.tensor.fill_(1)
if {where!r} == "protected":
    window.protect("none", 4096, 8192)
    print(ctypes.c_ubyte.from_address(window.address).value, flush=True)
    ctypes.c_ubyte.from_address(window.address + 4096).value
print(1, flush=True)
ctypes.c_ubyte.from_address(window.address + {{"before": -1, "after": 8192, "protected": 0}}[{where!r}]).value
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.stdout.strip() == "1"
    assert done.returncode == -signal.SIGSEGV


def test_red_zone_is_wide_enough() -> None:
    assert RED_ZONE >= 4096
    assert RED_ZONE % PAGE == 0


def test_too_much_memory_is_a_user_error_and_leaves_no_mapping() -> None:
    before, open_files = len(mappings()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="reusable segment"):
        Segment("reusable", 1 << 50)
    assert len(mappings()) == before
    assert len(os.listdir("/proc/self/fd")) == open_files
