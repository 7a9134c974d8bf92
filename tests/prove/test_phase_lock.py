"""The phase lock: a healthy layer never meets it; a late or early access ends the rank, and view, phase and rank are named."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import job

from palimpsest.core.errors import RankError
from palimpsest.prove.phase_lock import explain_fault
from palimpsest.ranks.spawn import spawn


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, touch: list[object] | None) -> list[dict[str, object]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    made = job(tmp_path)
    config = {"job": made.to_json(), "touch": touch}
    return [rank.value for rank in spawn(2, "lock_target:run", config, log=tmp_path / "log.txt")]


def test_a_healthy_layer_finds_the_other_history_closed_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in run(tmp_path, monkeypatch, None):
        assert found["closed"] == [
            "index_history in gather_latent", "index_history in sparse_attend",
            "latent_history in gather_index", "latent_history in index_select",
        ]  # fmt: skip
        assert found["checks"] == 4


@pytest.mark.parametrize(
    ("touch", "phase", "view"),
    [
        ([1, "sparse_attend", "index_select", "index_history", "keys"], "p7", "index_history"),
        ([1, "gather_history", "index_select", "index_history", "scales"], "p6", "index_history"),
        ([0, "index_select", "sparse_attend", "latent_history", "latent_history"], "p3", "latent_history"),
    ],
    ids=["late, in attention", "late, in the latent gather", "early"],
)
def test_a_late_or_early_access_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, touch: list[object], phase: str, view: str
) -> None:
    with pytest.raises(RankError, match="SIGSEGV") as caught:
        run(tmp_path, monkeypatch, touch)
    assert (caught.value.rank, caught.value.phase) == (touch[0], phase)
    assert explain_fault(tmp_path / "work", caught.value.rank) == f"it touched {view} while the phase lock held it closed"


def test_a_rank_without_a_note_has_no_explanation(tmp_path: Path) -> None:
    assert explain_fault(tmp_path, 3) == ""
