"""The board and the parent's ears: records survive hostile text, the right rank is called late, garbage is bounded."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from palimpsest.core.errors import RankError
from palimpsest.ranks.board import FileBoard, Progress, Reporter, StoreBoard, late_rank, unpack
from palimpsest.ranks.watch import Lines, Log, Watch


@given(
    calls=st.integers(0, 2**64 - 1),
    ns=st.integers(0, 2**64 - 1),
    waiting=st.booleans(),
    peer=st.integers(-1, 1000),
    phase=st.text(max_size=80),
    call=st.text(max_size=80),
)
def test_a_record_survives_packing(calls: int, ns: int, waiting: bool, peer: int, phase: str, call: str) -> None:
    back = unpack(Progress(calls, ns, waiting, peer, phase, call).pack())
    assert (back.calls, back.ns, back.waiting, back.peer) == (calls, ns, waiting, peer)
    if phase and phase.isascii() and phase.isprintable():
        assert back.phase == phase[:52]


def test_ranks_share_a_file_board(tmp_path: Path) -> None:
    board = FileBoard(tmp_path / "board", 3, create=True)
    pen = Reporter(FileBoard(tmp_path / "board", 3), 1)
    assert board.read(1).ns == 0
    pen.enter("p6")
    pen.call("barrier latent")
    pen.wait_for(2)
    assert str(board.read(1)) == "waiting in barrier latent for rank 2, phase p6"
    pen.done()
    assert str(board.read(1)) == "running, phase p6"
    assert str(board.read(0)) == "not started"


def test_ranks_share_a_store_board() -> None:
    store = dist.HashStore()
    board = StoreBoard(store, 2)
    Reporter(StoreBoard(store, 2), 1).enter("p3")
    assert board.read(1).phase == "p3"
    assert board.read(0) == Progress()


@pytest.mark.parametrize(
    ("records", "late"),
    [
        ([Progress(3, 1), Progress(2, 1), Progress(3, 1)], 1),
        ([Progress(3, 1, True), Progress(3, 1, True), Progress(3, 1, False)], 2),
        ([Progress(3, 1), Progress(2, 1), Progress(0, 0)], 2),
        ([Progress(3, 1, True), Progress(3, 1, True), Progress(3, 1, True)], 1),
    ],
    ids=["fewest calls", "running while others wait", "not started", "else the one waited for"],
)
def test_the_late_rank(records: list[Progress], late: int) -> None:
    assert late_rank(records, prefer=1) == late


def test_a_line_without_end_is_cut() -> None:
    read, write = os.pipe()
    seen: list[bytes] = []
    lines = Lines(read, seen.append, 100)
    os.write(write, b"one\ntwo\n" + b"x" * 5000)
    assert lines.pump()
    os.write(write, b"tail")
    os.close(write)
    assert not lines.pump()
    assert seen[:2] == [b"one", b"two"]
    assert b"".join(seen[2:]) == b"x" * 5000 + b"tail"
    os.close(read)


def test_a_report_that_is_not_json_fails_its_rank(tmp_path: Path) -> None:
    board = FileBoard(tmp_path / "board", 2, create=True)
    watch = Watch(2, board=board, log=Log(None, 2), deadline_s=60, start_s=60, on_event=None)
    pipes = [os.pipe() for _ in range(6)]
    watch.listen(pipes[0][0], [read for read, _ in pipes[1:4]], [read for read, _ in pipes[4:]])
    os.write(pipes[0][1], json.dumps({"started": [os.getpid()] * 2}).encode() + b"\n")
    os.write(pipes[5][1], b"\xff\xfe not json\n")
    with pytest.raises(RankError, match="rank 1 in start: sent a report that is not JSON"):
        watch.run(lambda rank: None)
    watch.close()
    for pipe in pipes:
        os.close(pipe[0])
        os.close(pipe[1])


def test_the_cause_overrules_the_symptom(tmp_path: Path) -> None:
    """Rank 0 lost rank 1, and says so before the news of rank 1's death arrives."""
    board = FileBoard(tmp_path / "board", 2, create=True)
    watch = Watch(2, board=board, log=Log(None, 2), deadline_s=60, start_s=60, on_event=None)
    pipes = [os.pipe() for _ in range(6)]
    watch.listen(pipes[0][0], [read for read, _ in pipes[1:4]], [read for read, _ in pipes[4:]])
    lost = {"rank": 0, "phase": "p6", "message": "lost rank 1", "type": "RankError", "exit_code": 1, "secondary": True}
    os.write(pipes[4][1], json.dumps({"error": lost}).encode() + b"\n")
    watch.pump(1.0)
    os.write(pipes[0][1], json.dumps({"exit": 1, "status": 9}).encode() + b"\n")
    with pytest.raises(RankError, match="rank 1 in start: died: killed by SIGKILL"):
        watch.run(lambda rank: None)
    watch.close()
    for pipe in pipes:
        os.close(pipe[0])
        os.close(pipe[1])
