"""``qualify`` end to end on real rank processes, what it refuses, and the exit codes of both verbs."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import job

from palimpsest.checkpoint.make import make
from palimpsest.cli.main import main
from palimpsest.core.errors import BadCheckpoint, BadConfig, RankError, Unavailable, UnknownName, Unsupported
from palimpsest.prove import qualify as parent
from palimpsest.prove.cases import Profile
from palimpsest.prove.evidence import EvidenceFolder, new_run_id
from palimpsest.prove.qualify import Request, choose_profile, examine, publish, qualify
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.prove.verify import verify
from palimpsest.ranks.spawn import spawn
from palimpsest.report import qualify_text

#: 4 ranks, 16 rows, 512 tokens
SMALL = Profile("small", 512, 16, 4, 16)
TARGET = "palimpsest.prove.rank_main:run_rank"


def run(made: Job, evidence: Path) -> parent.Outcome:
    """Real processes, published evidence."""
    setup = Setup(made)
    with EvidenceFolder(evidence, new_run_id()) as folder:
        before = parent.Before.now(setup)
        ended = spawn(made.profile.ranks, TARGET, made.to_json(), deadline_s=120, log=folder.work / "log.txt")
        request = Request(model=Path(made.model), evidence=evidence)
        return publish(folder, setup, parent.gather(setup, ended, before), request=request, elapsed_ns=1)


@pytest.mark.ranks
def test_four_real_ranks_pass_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(job(tmp_path, profile=SMALL, alone=True), tmp_path / "evidence")
    assert outcome.record["gates_verdict"] == "PASS", [f for f in outcome.flags if f["verdict"] != "PASS"][:3]
    found = verify(outcome.folder)
    assert found.gates_verdict == "PASS"
    saved = outcome.record["allocation"]
    assert saved["logical_difference"] == 132 * SMALL.tokens
    assert saved["torch_peak_after_seal"] == 0
    assert (outcome.folder / "log.txt").is_file()
    qualify_text.show(outcome.record, outcome.flags, "there")
    shown = capsys.readouterr().out
    assert "sparse path executed on layers [3], rows selecting: " in shown
    assert "not licensed on this machine" in shown
    assert qualify_text.headline(outcome.record) in shown.splitlines()[-1]


def test_a_dirty_source_is_told_beside_the_pass() -> None:
    record = {"gates_verdict": "PASS", "verdict": "INCONCLUSIVE", "failure": None}
    assert qualify_text.headline(record) == "PASS (uncommitted source: recorded as INCONCLUSIVE)"
    assert qualify_text.headline(record | {"verdict": "PASS"}) == "PASS"
    failed = record | {"gates_verdict": "ERROR", "failure": "rank 3 in p5: died"}
    assert qualify_text.headline(failed) == "ERROR: rank 3 in p5: died"


def test_a_rank_that_fails_is_recorded_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("tiny-k31", tmp_path / "model")

    def fails(*_: object, **__: object) -> list[object]:
        raise RankError("died: killed by SIGKILL", rank=2, phase="p5")

    monkeypatch.setattr(parent, "_run", fails)
    with pytest.raises(RankError, match=r"rank 2 in p5: died: killed by SIGKILL; recorded in "):
        qualify(Request(model=model, ranks=4, evidence=tmp_path / "evidence"))
    (folder,) = (tmp_path / "evidence").iterdir()
    found = verify(folder)
    assert (found.verdict, found.gates_verdict) == ("ERROR", "ERROR")
    assert main(["verify", str(folder)]) == 1


def test_an_interrupted_run_leaves_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("tiny-k31", tmp_path / "model")

    def interrupted(*_: object, **__: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(parent, "_run", interrupted)
    assert main(["qualify", str(model), "--ranks", "4", "--evidence", str(tmp_path / "evidence")]) == 130
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_wrong_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = make("tiny-k31", tmp_path / "model")
    with pytest.raises(UnknownName, match="unknown profile 'huge'; known: full, small, wide"):
        qualify(Request(model=model, profile="huge", evidence=tmp_path / "e"))
    with pytest.raises(BadConfig, match=r"3 ranks do not fit the 16 heads .* --ranks 1, 2, 4, 8, 16"):
        qualify(Request(model=model, ranks=3, evidence=tmp_path / "e"))
    with pytest.raises(Unsupported, match="linear"):
        qualify(Request(model=model, layer=0, evidence=tmp_path / "e"))
    with pytest.raises(UnknownName, match="unknown engine 'abacus'; known: amx, avx, avx512, portable"):
        qualify(Request(model=model, engine="abacus", evidence=tmp_path / "e"))
    shard = next(p for p in sorted(model.iterdir()) if p.suffix == ".safetensors")
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(BadCheckpoint):
        qualify(Request(model=model, evidence=tmp_path / "e"))
    assert not (tmp_path / "e").exists()


def test_a_shared_layer_has_nothing_to_reuse(tmp_path: Path) -> None:
    model = make("tiny-glm", tmp_path / "model")
    with pytest.raises(Unsupported, match=r"layer 2 .* no index history to reuse; full layers are 0, 1, 3"):
        qualify(Request(model=model, layer=2, ranks=4, evidence=tmp_path / "e"))


def test_a_top_k_that_needs_the_wide_profile_says_so(tmp_path: Path) -> None:
    model = make("wide-k31", tmp_path / "model")
    geometry, _ = examine(model)
    with pytest.raises(BadConfig, match="use --profile wide"):
        choose_profile(Request(model=model, ranks=4), geometry)
    assert choose_profile(Request(model=model, profile="wide"), geometry).tokens == 1 << 20


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qualify", str(tmp_path / "nothing")]) == 2
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2


def test_a_place_that_cannot_hold_evidence_is_refused_first(tmp_path: Path) -> None:
    model = make("tiny-k31", tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="name a writable place"):
        qualify(Request(model=model, ranks=4, evidence=tmp_path / "file" / "evidence"))


def test_a_job_survives_json(tmp_path: Path) -> None:
    made = job(tmp_path, "C02", profile=SMALL)
    assert Job.from_json(json.loads(json.dumps(made.to_json()))) == made
