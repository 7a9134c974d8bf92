"""Where a rank keeps its copies, how ranks take turns, and that what was judged once is recognised and never wrongly."""

import errno
import hashlib
import multiprocessing
import os
import signal
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from palimpsest.core.errors import RankError, Unavailable
from palimpsest.prove.exact import IndexRow, decode_keys, exact_score, filtered_scores
from palimpsest.prove.latents import LatentFile
from palimpsest.prove.lattice import Lattice
from palimpsest.prove.rank_main import Qualifier
from palimpsest.prove.spill import LEAST, Spill
from palimpsest.prove.turns import Turns
from palimpsest.run.meters import mappings
from tests.prove.harness import TINY, failing, job, qualify_locally


def test_large_arrays_lie_in_files_that_nobody_can_leave_behind(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    source = np.random.default_rng(0).integers(0, 256, (3, LEAST), np.uint8)
    made = spill.copy(source)
    assert np.array_equal(made, source)
    assert not made.flags.owndata
    assert list(tmp_path.iterdir()) == []
    assert spill.copy(source[:, :8]).flags.owndata  # small: in memory
    named = spill.named(tmp_path / "rows", source)
    assert np.array_equal(np.memmap(tmp_path / "rows", np.uint8, "r").reshape(source.shape), named)
    assert spill.named(tmp_path / "nothing", np.empty((0, 0), np.uint8)).size == 0
    assert not (tmp_path / "nothing").exists()


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match=f"no room for {LEAST} bytes.*TMPDIR"):
        Spill(tmp_path).empty((LEAST,), np.uint8)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Unavailable, match=r"latent records of a replay \(80 bytes\).*TMPDIR"):
        LatentFile(tmp_path / "l", 4, 8, 1).write(0, np.zeros((3, 32), np.uint8), 10)


@pytest.mark.parametrize("visible", [1, 7, 8, 9, 31, 32])
def test_the_latents_of_all_ranks_are_in_token_order(tmp_path: Path, visible: int) -> None:
    page, record, ranks = 4, 3, 2
    history = np.random.default_rng(visible).integers(0, 256, (32, record), np.uint8)
    pages = history.reshape(8, page * record)
    file = LatentFile(tmp_path / "latents", page, record, ranks)
    file.write(0, pages[0::2], visible)
    if visible > page:
        with pytest.raises(RankError, match="rank 1"):
            file.read(visible)
    file.write(1, pages[1::2], visible)
    records, digest = file.read(visible)
    assert np.array_equal(records, history[:visible])
    records[0] ^= 255  # a reader's own change stays its own
    again, same = file.read(visible)
    assert np.array_equal(again, history[:visible])
    assert same == digest
    changed = pages.copy()
    changed[0, 0] ^= 1
    file.write(0, changed[0::2], visible)
    assert file.read(visible)[1] != digest
    file.remove()
    assert list(tmp_path.iterdir()) == []


def _work(folder: Path, rank: int, log: Path) -> None:
    turns = Turns(folder, rank, 6, 2)
    with turns.turn():
        with log.open("a") as out:
            out.write(f"+{rank}\n")
        time.sleep(0.02)
        with log.open("a") as out:
            out.write(f"-{rank}\n")


def _die(folder: Path) -> None:
    turns = Turns(folder, 0, 6, 2)
    turns.take()
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_more_ranks_work_than_there_are_turns(tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    dead = context.Process(target=_die, args=(tmp_path,))
    dead.start()
    dead.join()
    workers = [context.Process(target=_work, args=(tmp_path, rank, log)) for rank in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 6
    working: set[int] = set()
    for line in log.read_text().split():
        if line[0] == "+":
            working.add(int(line[1:]))
            assert len({rank % 2 for rank in working}) == len(working) <= 2
        else:
            working.remove(int(line[1:]))


def test_as_many_turns_as_ranks_means_no_waiting(tmp_path: Path) -> None:
    for slots in (0, 6, 7):
        one, two = (Turns(tmp_path, rank, 6, slots) for rank in (0, 0))
        one.take()
        two.take()
    assert list(tmp_path.iterdir()) == []


def lattice_rows(rng: np.random.Generator, rows: int, heads: int, dim: int) -> list[IndexRow]:
    return [
        IndexRow(rng.integers(-1, 2, (heads, dim)).astype(float), rng.choice([-2, -1, 1, 2], heads).astype(np.float32), "fp8")
        for _ in range(rows)
    ]


def test_lattice_scores_are_the_integers(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = lattice_rows(rng, 3, 5, 32)
    values = np.array([0xB8, 0, 0x38], np.uint8)[rng.integers(0, 3, (50, 32))]
    scales = rng.choice([1, 2, 3], 50).astype(np.float32)
    whole = Lattice.of(rows)
    assert whole is not None
    found = whole.scores(values, scales)
    assert found is not None
    keys = decode_keys(values, "fp8")
    for row, scores in zip(rows, found, strict=True):
        exact = [exact_score(row, key, float(s)) for key, s in zip(keys, scales, strict=True)]
        assert [Fraction(float(s)) for s in scores] == [Fraction(e.mantissa) * Fraction(2) ** e.exponent for e in exact]
        assert np.array_equal(filtered_scores(row, keys, scales).value, scores)


def test_what_fp32_might_round_is_not_taken_for_a_lattice() -> None:
    rng = np.random.default_rng(4)
    rows = lattice_rows(rng, 2, 4, 16)
    one = np.full((3, 16), 0x38, np.uint8)
    half = one.copy()
    half[1, 3] = 0x30  # 0.5
    nan = one.copy()
    nan[0, 0] = 0x7F
    large = np.full((3, 16), 0x7E, np.uint8)  # 448
    whole = Lattice.of(rows)
    assert whole is not None
    assert whole.scores(one, None) is not None
    assert whole.scores(half, None) is None
    assert whole.scores(nan, None) is None
    assert whole.scores(one, np.array([1, 0.5, 1], np.float32)) is None
    assert whole.scores(large, np.full(3, 4096, np.float32)) is None
    assert Lattice.of([IndexRow(rows[0].query + 0.25, rows[0].weights, "fp8")]) is None
    assert Lattice.of([IndexRow(rows[0].query, rows[0].weights, "fp32")]) is None
    assert Lattice.of([]) is None


def test_equal_bytes_are_judged_once_and_counted_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palimpsest.prove import gates_select, tail

    judged, tails = [], []
    right, attend = gates_select.ties.validity_faults, tail.Tail.attend
    monkeypatch.setattr(
        gates_select.ties, "validity_faults", lambda picked, ranked, topk: judged.append(1) or right(picked, ranked, topk)
    )

    def counted(self, o, ids, counts, rows):
        tails.append(hashlib.blake2b(ids.tobytes()).digest())
        return attend(self, o, ids, counts, rows)

    monkeypatch.setattr(tail.Tail, "attend", counted)
    results = qualify_locally(job(tmp_path, "C03"))
    assert failing(results) == set()
    rows = TINY.rows
    flags = [f for r in results for f in r["flags"] if f["gate"] in ("K2", "O1")]
    assert all(f["n_checked"] == f["n_expected"] >= rows for f in flags)
    assert len(judged) == rows  # the second arrangement has the same bytes
    # per rank: all rows once, and per arrangement the audited rows once more and in reverse order
    assert len(tails) == TINY.ranks * (1 + 2 * 2)


def test_a_fault_is_never_remembered(tmp_path: Path) -> None:
    def wrong(arrangement, op, run, call, chunk):
        run(call, chunk)
        if op == "index_select" and chunk.rows:
            ids = call.view("local_ids").numpy()
            ids[0, 0], ids[0, 1] = ids[0, 1], ids[0, 0]

    results = qualify_locally(job(tmp_path, "C03"), wrong)
    assert {"K1"} <= failing(results)
    flags = [f for r in results for f in r["flags"] if f["gate"] == "O1"]
    assert all(f["n_checked"] == f["n_expected"] for f in flags)


def test_one_arrangement_is_gone_before_the_next_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once need twice the memory."""
    found = {}
    right = Qualifier._prepare

    def prepare(self, name):
        if self.rank == 0:
            found[name] = [one for one in mappings() if "programs" not in one.name]  # cores of other tests in this process
        return right(self, name)

    monkeypatch.setattr(Qualifier, "_prepare", prepare)
    assert failing(qualify_locally(job(tmp_path, "C05", "C06"))) == set()
    assert found == {"base": [], "alias": []}
