"""``palimpsest verify DIR``: a separate reader that trusts nothing a run says about itself.

It imports neither the qualifier nor its gates nor torch. From the files alone it recomputes the manifest, checks every shape,
derives from its own table which case x rank x gate cells must exist and how many units each must have checked, re-derives the
storage relation from the recorded layout, replays the tie certificates' arithmetic, and forms the verdict again.
The record's own verdict must come out the same.
"""

import hashlib
import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.core.canon import canonical
from palimpsest.core.errors import EvidenceError
from palimpsest.prove import schema
from palimpsest.prove.verify_events import check_events
from palimpsest.prove.verify_layout import check_layout
from palimpsest.prove.verify_table import Table, absent_gates, case_ids
from palimpsest.prove.verify_ties import check_certificates

_FILES = ("events.jsonl", "flags.jsonl", "log.txt", "record.json", "ties.jsonl")
#: there when a self-test licensed the run
_MATRIX = "kill_matrix.json"
_MANIFEST = "MANIFEST.sha256"
_ORDER = ("PASS", "INCONCLUSIVE", "FAIL", "ERROR")
#: bytes of one evidence file that are read at most
_FILE_CAP = 256 << 20
_DEPTH_CAP = 32


@dataclass(frozen=True)
class Verified:
    """What a folder supports.

    verdict:       re-derived, after the caps (uncommitted source)
    gates_verdict: the maximum over all cells
    cells:         how many cells were checked
    certificates:  how many tie certificates were replayed
    """

    folder: str
    run_id: str
    verdict: str
    gates_verdict: str
    cells: int
    certificates: int
    failures: tuple[str, ...]
    plan_digest: str
    gates_absent: tuple[str, ...]


def verify(folder: Path) -> Verified:
    """Read an evidence folder and re-derive its verdict. Raises EvidenceError naming the first thing that does not hold."""
    files = _read_folder(folder)
    record = _parse(files["record.json"], "record.json")
    schema.validate(record, schema.RECORD, "record.json")
    _require(files["record.json"] == (canonical(record) + "\n").encode(), "record.json is not in canonical form: it was edited")
    flags = _lines(files["flags.jsonl"], "flags.jsonl", schema.FLAG)
    found = hashlib.sha256(files["flags.jsonl"]).hexdigest()
    _require(
        found == record["flags"]["sha256"],
        f"flags.jsonl has digest {found[:16]}..., the record names {record['flags']['sha256'][:16]}...",
    )
    found = hashlib.sha256(files["events.jsonl"]).hexdigest()
    _require(
        found == record["events"]["sha256"],
        f"events.jsonl has digest {found[:16]}..., the record names {record['events']['sha256'][:16]}...",
    )
    if record["failure"] is not None:
        return _failed_run(folder, record, flags)
    _check_cases(record)
    check_layout(record)
    cells = _check_cells(record, flags)
    certificates = check_certificates(_lines(files["ties.jsonl"], "ties.jsonl", None), record, cells)
    _check_matrix(files.get(_MATRIX), record)
    events = _lines(files["events.jsonl"], "events.jsonl", None)
    _require(
        len(events) == record["events"]["lines"],
        f"events.jsonl has {len(events)} lines, the record counts {record['events']['lines']}",
    )
    check_events(events, record, cells)
    gates = _worst(flag["verdict"] for flag in flags)
    if record["sparse"]["rows_selecting"] == 0:
        gates = _worst((gates, "FAIL"))
    return _finish(folder, record, flags, gates, certificates)


def _finish(folder: Path, record: dict[str, Any], flags: list[dict[str, Any]], gates: str, certificates: int) -> Verified:
    """Cap the verdict, compare it with the recorded one, and report."""
    verdict = _worst((gates, "INCONCLUSIVE")) if record["source"]["dirty"] else gates
    for name, derived in (("gates_verdict", gates), ("verdict", verdict)):
        _require(record[name] == derived, f"record.json says {name} {record[name]}, its cells say {derived}")
    failures = tuple(
        f"{f['case']}/rank{f['rank']}/{f['gate']}: {f['verdict']}: {f['first_failure']}" for f in flags if f["verdict"] != "PASS"
    )
    return Verified(
        folder=folder.name, run_id=record["run_id"], verdict=verdict, gates_verdict=gates, cells=len(flags),
        certificates=certificates,
        failures=failures, plan_digest=record["plan"]["alias"]["digest"], gates_absent=tuple(record["gates_absent"]),
    )  # fmt: skip


def _failed_run(folder: Path, record: dict[str, Any], flags: list[dict[str, Any]]) -> Verified:
    """A run that ended in an error has no complete table; its verdict can only be ERROR."""
    for name in ("gates_verdict", "verdict"):
        _require(record[name] == "ERROR", f"record.json says {name} {record[name]} of a run that ended with: {record['failure']}")
    return Verified(
        folder=folder.name, run_id=record["run_id"], verdict="ERROR", gates_verdict="ERROR", cells=len(flags), certificates=0,
        failures=(record["failure"],), plan_digest=record["plan"]["alias"]["digest"], gates_absent=tuple(record["gates_absent"]),
    )  # fmt: skip


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Every file of the folder, after the manifest was checked. Raises EvidenceError."""
    if not folder.is_dir() or folder.is_symlink():
        raise EvidenceError(f"{folder} is not an evidence folder; name the folder that `palimpsest qualify` printed")
    there = {path.name for path in folder.iterdir()}
    for name in (*_FILES, _MANIFEST):
        _require(name in there, f"{folder}: {name} is missing")
    names = (*_FILES, _MATRIX) if _MATRIX in there else _FILES
    extra = sorted(there - {*names, _MANIFEST})
    _require(not extra, f"{folder}: {extra[0] if extra else ''} does not belong to an evidence folder")
    files = {name: _read(folder / name) for name in (*names, _MANIFEST)}
    listed = _manifest(files[_MANIFEST])
    _require(set(listed) == set(names), f"{_MANIFEST} lists {sorted(listed)}, the folder holds {sorted(names)}")
    for name, wanted in listed.items():
        found = hashlib.sha256(files[name]).hexdigest()
        _require(
            found == wanted, f"{name} has digest {found[:16]}..., {_MANIFEST} says {wanted[:16]}...: it was edited or cut short"
        )
    return files


def _read(path: Path) -> bytes:
    status = path.lstat()
    _require(stat.S_ISREG(status.st_mode), f"{path.name} is not a regular file")
    _require(
        status.st_size <= _FILE_CAP,
        f"{path.name} has {status.st_size} bytes, more than the {_FILE_CAP} an evidence file may have",
    )
    return path.read_bytes()


def _manifest(raw: bytes) -> dict[str, str]:
    listed: dict[str, str] = {}
    for number, line in enumerate(_text(raw, _MANIFEST).splitlines(), 1):
        digest, gap, name = line[:64], line[64:66], line[66:]
        good = len(digest) == 64 and set(digest) <= set("0123456789abcdef") and gap == "  " and bool(name)
        _require(good and name not in listed, f"{_MANIFEST} line {number} is not `sha256  name`, or names a file twice")
        listed[name] = digest
    return listed


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvidenceError(f"{name} is not UTF-8 at byte {error.start}") from None


def _refuse_constant(text: str) -> Any:
    raise EvidenceError(f"the literal {text} is not JSON")


def _refuse_float(text: str) -> Any:
    raise EvidenceError(f"the number {text} is not an integer; exact values are integers or hexadecimal strings")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    _require(len(made) == len(pairs), "a JSON object names a key twice")
    return made


def _parse(raw: bytes, where: str) -> Any:
    text = _text(raw, where)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_float=_refuse_float, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise EvidenceError(
            f"{where} is not JSON at line {error.lineno} column {error.colno}: it was edited or cut short"
        ) from None
    except RecursionError:
        raise EvidenceError(f"{where} is nested deeper than {_DEPTH_CAP}") from None
    except EvidenceError:
        raise
    except ValueError:
        raise EvidenceError(f"{where} holds an integer of thousands of digits") from None
    _check_plain(value, where)
    return value


def _check_plain(value: Any, where: str) -> None:
    """At most ``_DEPTH_CAP`` levels, and text that UTF-8 can hold: an escape may name half of a surrogate pair."""
    layer = [value]
    for _ in range(_DEPTH_CAP + 1):
        texts = [item for item in layer if isinstance(item, str)]
        layer = [item for item in layer if isinstance(item, (dict, list))]
        texts += [key for item in layer if isinstance(item, dict) for key in item]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise EvidenceError(f"{where} holds half of a surrogate pair, which is no text") from None
        if not layer:
            return
        layer = [child for item in layer for child in (item.values() if isinstance(item, dict) else item)]
    raise EvidenceError(f"{where} is nested deeper than {_DEPTH_CAP}")


def _lines(raw: bytes, name: str, shape: dict[str, Any] | None) -> list[dict[str, Any]]:
    _require(not raw or raw.endswith(b"\n"), f"{name} does not end with a line end: it was cut short")
    rows = []
    for number, line in enumerate(raw.splitlines(), 1):
        row = _parse(line, f"{name} line {number}")
        if shape is not None:
            schema.validate(row, shape, f"{name} line {number}")
        rows.append(row)
    return rows


def _check_matrix(raw: bytes | None, record: dict[str, Any]) -> None:
    """A record that names a self-test carries it, passed, for the very source that ran; one that names none says so. Raises
    EvidenceError.
    """
    named = record["self_test"]
    _require(
        (raw is None) == (named is None),
        f"record.json names self-test {named}, and {_MATRIX} is {'missing' if raw is None else 'there'}",
    )
    absent = absent_gates(record)
    _require(
        sorted(record["gates_absent"]) == absent,
        f"record.json lists {record['gates_absent']} as absent; by its engine and its self-test {named} that is {absent}",
    )
    if raw is None:
        return
    _require(hashlib.sha256(raw).hexdigest() == named, f"{_MATRIX} is not the self-test that record.json names")
    matrix = _parse(raw, _MATRIX)
    good = (
        isinstance(matrix, dict)
        and matrix.get("verdict") == "PASS"
        and matrix.get("package_digest") == record["source"]["package_digest"]
    )
    _require(good, f"{_MATRIX} did not pass, or is of another source than this run")


def _check_cases(record: dict[str, Any]) -> None:
    """The eleven cases are there, in order, with the active sizes their definitions give at these limits."""
    ids = [case["id"] for case in record["cases"]]
    _require(ids == case_ids(), f"record.json has cases {ids}, a qualification has {case_ids()}")
    Table(record).check_case_sizes()


def _check_cells(record: dict[str, Any], flags: list[dict[str, Any]]) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Every expected cell once, no other, each with the count that follows from the case table."""
    expected = Table(record).cells()
    cells: dict[tuple[str, int, str], dict[str, Any]] = {}
    for flag in flags:
        key = (flag["case"], flag["rank"], flag["gate"])
        name = f"{key[0]}/rank{key[1]}/{key[2]}"
        _require(key not in cells, f"flags.jsonl holds {name} twice")
        _require(key in expected, f"flags.jsonl holds {name}, which no case demands")
        cells[key] = flag
        _require(
            flag["n_expected"] == expected[key], f"{name} expected {flag['n_expected']} units, its case demands {expected[key]}"
        )
        if flag["verdict"] != "ERROR":
            _require(
                flag["n_checked"] == expected[key],
                f"{name} checked {flag['n_checked']} of {expected[key]} units and says {flag['verdict']}",
            )
        _require(
            (flag["verdict"] == "PASS") == (flag["first_failure"] is None),
            f"{name} says {flag['verdict']} and {flag['first_failure']!r}",
        )
    missing = sorted(set(expected) - set(cells))
    _require(not missing, f"flags.jsonl lacks {len(missing)} cells, the first is {_cell_name(missing)}")
    _require(
        record["flags"]["cells"] == len(cells),
        f"record.json counts {record['flags']['cells']} cells, flags.jsonl has {len(cells)}",
    )
    _check_case_verdicts(record, flags)
    return cells


def _check_case_verdicts(record: dict[str, Any], flags: list[dict[str, Any]]) -> None:
    for case in record["cases"]:
        derived = _worst(f["verdict"] for f in flags if f["case"] == case["id"])
        _require(case["verdict"] == derived, f"record.json says {case['id']} is {case['verdict']}, its cells say {derived}")


def _cell_name(keys: list[tuple[str, int, str]]) -> str:
    return f"{keys[0][0]}/rank{keys[0][1]}/{keys[0][2]}" if keys else ""


def _worst(verdicts: Any) -> str:
    return max(verdicts, key=_ORDER.index, default="ERROR")


def _require(good: bool, message: str) -> None:
    if not good:
        raise EvidenceError(message)
