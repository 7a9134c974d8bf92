"""The evidence folder is published whole or not at all, and a record says where it was made without saying more."""

import errno
import os
from pathlib import Path

import pytest

from palimpsest.core.errors import Unavailable
from palimpsest.prove import record
from palimpsest.prove.evidence import EvidenceFolder, manifest_text, new_run_id, previous_digest


def test_a_published_folder_holds_its_manifest(tmp_path: Path) -> None:
    with EvidenceFolder(tmp_path / "evidence", new_run_id()) as folder:
        folder.write("record.json", "{}\n")
        folder.write_lines("flags.jsonl", [{"b": 1, "a": 2}])
        final = folder.publish()
    assert (final / "flags.jsonl").read_text() == '{"a":2,"b":1}\n'
    assert (final / "MANIFEST.sha256").read_text() == manifest_text(final, ["record.json", "flags.jsonl"])
    assert [p.name for p in (tmp_path / "evidence").iterdir()] == [final.name]


def interrupted(root: Path) -> None:
    with EvidenceFolder(root, new_run_id()) as folder:
        folder.write("record.json", "{}\n")
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "evidence")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_keeps_the_runs_before_it(tmp_path: Path) -> None:
    with EvidenceFolder(tmp_path, new_run_id()) as folder:
        kept = folder.publish()
    with pytest.raises(KeyboardInterrupt), EvidenceFolder(tmp_path, new_run_id()):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(Unavailable, match="the disk is full; free some space or name another place"),
        EvidenceFolder(tmp_path / "e", new_run_id()) as folder,
    ):
        folder.write("record.json", "{}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_outside_our_own_writes_is_told_the_same_way(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="the disk is full"), EvidenceFolder(tmp_path / "e", new_run_id()):
        raise OSError(errno.ENOSPC, "no space")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="name a writable place"), EvidenceFolder(tmp_path / "file" / "evidence", new_run_id()):
        pass


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    with EvidenceFolder(tmp_path, new_run_id()) as folder:
        folder.final.mkdir()
        (folder.final / "record.json").write_text("mine")
        with pytest.raises(Unavailable):
            folder.publish()
    assert (folder.final / "record.json").read_text() == "mine"


def test_the_previous_record_of_a_plan_is_chained(tmp_path: Path) -> None:
    assert previous_digest(tmp_path, "a" * 64) is None
    with EvidenceFolder(tmp_path, new_run_id()) as folder:
        folder.write_lines("record.json", [{"plan": {"alias": {"digest": "a" * 64}}}])
        folder.publish()
    found = previous_digest(tmp_path, "a" * 64)
    assert found is not None
    assert len(found) == 64
    assert previous_digest(tmp_path, "b" * 64) is None


def test_an_unlisted_variable_never_reaches_the_record() -> None:
    listed, whole = record.environment_facts({"OMP_NUM_THREADS": "1", "SECRET": "hunter2"})
    assert listed == {"OMP_NUM_THREADS": "1"}
    assert whole != record.environment_facts({"OMP_NUM_THREADS": "1"})[1]


def test_the_source_is_named_by_commit_or_by_package() -> None:
    facts = record.source_facts()
    assert facts["kind"] in ("git", "package")
    assert (facts["commit"] is None) == (facts["kind"] == "package")
    assert len(facts["package_digest"]) == 64
    assert {"gates", "oracle", "verify"} <= set(facts["modules"])


def test_a_package_digest_follows_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = record.package_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not source")
    assert record.package_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    assert record.package_digest(tmp_path) != first


def test_machine_and_installed_facts_are_scalars() -> None:
    assert all(isinstance(v, (str, int)) for v in record.machine_facts().values())
    assert {"python", "torch", "numpy"} <= set(record.installed_facts())


def test_paths_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert record.relative_folder(tmp_path / "evidence" / "x") == "evidence/x"
    assert record.relative_folder(Path("/somewhere/else/model")) == "model"
