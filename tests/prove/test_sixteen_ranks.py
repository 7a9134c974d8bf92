"""Sixteen real processes of which one goes wrong: the error names it and its phase, nothing is left behind, nothing passes."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest

from palimpsest.checkpoint.make import make
from palimpsest.core.errors import RankError
from palimpsest.core.geometry import Formats
from palimpsest.prove.cases import Profile
from palimpsest.prove.mutants import PHASES
from palimpsest.prove.rank_setup import Job
from palimpsest.prove.selftest_ranks import VICTIM
from palimpsest.ranks.spawn import spawn

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(280)]
SIXTEEN = Profile("small", 4096, 256, 16, 16)
#: one of each in every run, all phases at night
WRONGS = [
    *(pytest.param("killed", p, p, marks=() if p == "p5" else pytest.mark.nightly, id=f"killed-{p}") for p in PHASES),
    pytest.param("stopped", "p6", "p6", marks=pytest.mark.nightly, id="stopped"),
    pytest.param("raises", "p5", "p5", marks=pytest.mark.nightly, id="raises"),
    pytest.param("other_plan", "plan", None, marks=pytest.mark.nightly, id="another-plan"),
]


@pytest.mark.parametrize(("action", "argument", "phase"), WRONGS)
def test_one_of_sixteen_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, argument: str, phase: str | None
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    model, work = make("tiny-k31", tmp_path / "model"), tmp_path / "work"
    work.mkdir()
    made = Job(
        model=str(model), workdir=str(work), layer=3, profile=SIXTEEN, seed=11, engine="portable", formats=Formats(), alone=True
    )
    agreed: set[int] = set()
    config = {"job": made.to_json(), "action": action, "argument": argument}
    with pytest.raises(RankError) as caught:
        spawn(
            16,
            "palimpsest.prove.selftest_ranks:run",
            config,
            deadline_s=30.0,
            on_event=lambda rank, event: agreed.add(rank),
        )
    assert caught.value.rank == VICTIM
    assert phase in (None, caught.value.phase)
    assert str(caught.value).startswith(f"rank {VICTIM} in ")
    assert len(agreed) == (0 if action == "other_plan" else 16)
    children = [p for p in psutil.Process().children(recursive=True) if "palimpsest.ranks" in " ".join(p.cmdline())]
    assert not children
    assert not list(private.iterdir())
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("palimpsest")]
