"""``verify`` accepts what the qualifier wrote and refuses every edit of it."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import job, qualify_locally, with_parent

from palimpsest.core.canon import canonical
from palimpsest.core.errors import EvidenceError
from palimpsest.prove import schema
from palimpsest.prove.evidence import EvidenceFolder, manifest_text, new_run_id
from palimpsest.prove.qualify import Outcome, Request, publish
from palimpsest.prove.rank_setup import Setup
from palimpsest.prove.verify import verify

FILES = ("record.json", "flags.jsonl", "ties.jsonl", "events.jsonl", "log.txt")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A whole qualification on in-process ranks, published."""
    place = tmp_path_factory.mktemp("evidence")
    made = job(place)
    results = with_parent(made, qualify_locally(made))
    with EvidenceFolder(place / "evidence", new_run_id()) as folder:
        folder.write("log.txt", "[rank 00] a line\n")
        return publish(folder, Setup(made), results, request=Request(model=Path(made.model)), elapsed_ns=1)


@pytest.fixture
def folder(outcome: Outcome, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(outcome.folder, tmp_path / outcome.folder.name))


def seal_again(folder: Path) -> None:
    """What a forger does last: a fresh manifest."""
    (folder / "MANIFEST.sha256").write_text(manifest_text(folder, [n for n in FILES if (folder / n).exists()]))


def edit_record(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads((folder / "record.json").read_text())
    change(record)
    (folder / "record.json").write_text(canonical(record) + "\n")
    seal_again(folder)


def edit_flags(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Edit the cells, and make digest, count and manifest fit."""
    flags = [json.loads(line) for line in (folder / "flags.jsonl").read_text().splitlines()]
    change(flags)
    raw = "".join(canonical(f) + "\n" for f in flags).encode()
    (folder / "flags.jsonl").write_bytes(raw)
    edit_record(folder, lambda r: r["flags"].update(sha256=hashlib.sha256(raw).hexdigest(), cells=len(flags)))


def test_a_good_folder_verifies(outcome: Outcome) -> None:
    found = verify(outcome.folder)
    assert found.gates_verdict == "PASS" == outcome.record["gates_verdict"]
    assert found.verdict == outcome.record["verdict"]
    assert found.cells == len(outcome.flags) > 300
    assert found.failures == ()


def test_the_schemas_agree_with_a_standard_validator(outcome: Outcome) -> None:
    jsonschema.Draft202012Validator.check_schema(schema.RECORD)
    jsonschema.validate(json.loads((outcome.folder / "record.json").read_text()), schema.RECORD)
    for flag in outcome.flags[:50]:
        jsonschema.validate(json.loads(canonical(flag)), schema.FLAG)


@pytest.mark.parametrize("value", [{"case": 1}, {"case": "C01", "more": 0}, [], None, {"case": "C01", "rank": True}])
def test_both_validators_refuse_the_same(outcome: Outcome, value: Any) -> None:
    if isinstance(value, dict):
        value = outcome.flags[0] | value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, schema.FLAG)
    with pytest.raises(EvidenceError, match="flag"):
        schema.validate(value, schema.FLAG, "flag")


def test_an_edited_file_without_a_new_manifest(folder: Path) -> None:
    text = (folder / "flags.jsonl").read_text()
    (folder / "flags.jsonl").write_text(text.replace('"n_checked":2', '"n_checked":3', 1))
    with pytest.raises(EvidenceError, match=r"flags[.]jsonl has digest .* edited or cut short"):
        verify(folder)


@pytest.mark.parametrize("name", [*FILES, "MANIFEST.sha256"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(EvidenceError, match=f"{name} is missing"):
        verify(folder)


def test_an_extra_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("hello")
    with pytest.raises(EvidenceError, match=r"notes[.]txt does not belong"):
        verify(folder)


def test_a_link_instead_of_a_file(folder: Path, tmp_path: Path) -> None:
    (folder / "log.txt").rename(tmp_path / "elsewhere")
    (folder / "log.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EvidenceError, match=r"log[.]txt is not a regular file"):
        verify(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file(folder: Path, name: str) -> None:
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2] if raw else b"x")
    with pytest.raises(EvidenceError, match=f"{name} has digest"):
        verify(folder)


def test_a_truncated_flags_file_with_a_new_manifest(folder: Path) -> None:
    raw = (folder / "flags.jsonl").read_bytes()[:-10]
    (folder / "flags.jsonl").write_bytes(raw)
    edit_record(folder, lambda r: r["flags"].update(sha256=hashlib.sha256(raw).hexdigest()))
    with pytest.raises(EvidenceError, match="cut short"):
        verify(folder)


@pytest.mark.parametrize("line", ["", "zz  record.json\n", "0" * 64 + " record.json\n"])
def test_a_malformed_manifest(folder: Path, line: str) -> None:
    (folder / "MANIFEST.sha256").write_text(line)
    with pytest.raises(EvidenceError, match="MANIFEST"):
        verify(folder)


FORGERIES: list[tuple[str, Callable[[list[dict[str, Any]]], Any], str]] = [
    ("a cell removed", lambda flags: flags.pop(40), "lacks 1 cells"),
    ("a rank removed", lambda flags: [flags.remove(f) for f in list(flags) if f["rank"] == 1], "lacks"),
    ("a cell twice", lambda flags: flags.append(dict(flags[0])), "twice"),
    ("a cell nobody asked for", lambda flags: flags.append(flags[0] | {"case": "C99"}), "no case demands"),
    ("an unknown gate", lambda flags: flags[0].update(gate="Z9"), "no case demands"),
    ("a smaller expectation", lambda flags: flags[60].update(n_expected=1, n_checked=1), "its case demands"),
    ("less checked than expected", lambda flags: flags[60].update(n_checked=flags[60]["n_checked"] - 1), "and says PASS"),
    ("a failure called a pass", lambda flags: flags[60].update(first_failure="something"), "says PASS and 'something'"),
    ("a pass called a failure", lambda flags: flags[60].update(verdict="FAIL"), "says FAIL and None"),
    ("a failed cell", lambda flags: flags[60].update(verdict="FAIL", first_failure="x"), "its cells say FAIL"),
]


@pytest.mark.parametrize(("change", "message"), [f[1:] for f in FORGERIES], ids=[f[0] for f in FORGERIES])
def test_forged_flags(folder: Path, change: Callable[[list[dict[str, Any]]], Any], message: str) -> None:
    edit_flags(folder, change)
    with pytest.raises(EvidenceError, match=message):
        verify(folder)


def first_case(record: dict[str, Any]) -> dict[str, Any]:
    return record["cases"][0]


RECORDS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("another verdict", lambda r: r.update(verdict="PASS" if r["verdict"] != "PASS" else "FAIL"), "record.json says"),
    ("nothing selected", lambda r: r["sparse"].update(rows_selecting=0), "its cells say FAIL"),
    ("fewer cases", lambda r: r["cases"].pop(), "a qualification has"),
    ("other sizes", lambda r: first_case(r)["steps"][0].update(rows=3), "its definition gives"),
    ("fewer audited rows", lambda r: first_case(r)["steps"][0]["audited"].pop(), "does not audit"),
    ("another regime", lambda r: first_case(r)["steps"][0].update(regime="natural"), "its definition says mixed"),
    ("fewer pads", lambda r: first_case(r)["minima"].update(pads=0), "declares 0 pad slots"),
    ("the histories apart", lambda r: r["plan"]["alias"]["views"]["index_history"].update(offset=64), "plan.alias"),
    ("a view outside", lambda r: r["plan"]["alias"]["views"]["output"].update(offset=1 << 40), "its segment has"),
    ("another saving", lambda r: r["facts"].update(index_record_bytes=131), "the index history has"),
    ("an unknown field", lambda r: r.update(more=1), "does not know"),
    ("a missing field", lambda r: r.pop("claim"), "lacks 'claim'"),
    ("a changed row without a certificate", lambda r: r["selection"].update(rows_changed=1), "ties.jsonl shows 0"),
    ("another count of cells", lambda r: r["flags"].update(cells=1), "record.json counts 1 cells"),
]


@pytest.mark.parametrize(("change", "message"), [r[1:] for r in RECORDS], ids=[r[0] for r in RECORDS])
def test_forged_records(folder: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit_record(folder, change)
    with pytest.raises(EvidenceError, match=message):
        verify(folder)


@pytest.mark.parametrize("text", ["{", '{"a":1,"a":2}', '{"a":1.5}', '{"a":NaN}', "[" * 100_000, "\xff"])
def test_hostile_json(folder: Path, text: str) -> None:
    (folder / "record.json").write_bytes(text.encode("latin-1"))
    seal_again(folder)
    with pytest.raises(EvidenceError):
        verify(folder)


def test_an_invented_certificate(folder: Path) -> None:
    (folder / "ties.jsonl").write_text(canonical({"case": "C03", "replay": 0, "certificate": {}, "records": {}}) + "\n")
    seal_again(folder)
    with pytest.raises(EvidenceError, match=r"ties[.]jsonl line 1"):
        verify(folder)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="is not an evidence folder"):
        verify(tmp_path / "nothing")


def test_verify_imports_neither_the_qualifier_nor_torch() -> None:
    code = (
        "import sys, palimpsest.prove.verify; print([m for m in sys.modules if m in ('torch', 'numpy', 'rich') or 'prove' in m])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "torch" not in loaded
    assert "numpy" not in loaded
    assert "qualify" not in loaded
    assert "gates" not in loaded
