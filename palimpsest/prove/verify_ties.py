"""Replay the tie certificates of an evidence folder with Python integers and the records they carry."""

from functools import partial
from typing import Any

from palimpsest.core.errors import EvidenceError
from palimpsest.prove.certificate import check_certificate

_FIELDS = {"case", "replay", "between", "certificate", "records"}
#: what differs -> the gate that demanded the proof; "rule" is the set that takes the lowest ids among equals
_GATE = {("base", "alias"): "K4", ("rule", "alias"): "K7"}


def check_certificates(
    lines: list[dict[str, Any]], record: dict[str, Any], cells: dict[tuple[str, int, str], dict[str, Any]]
) -> int:
    """Check every certificate; returns how many. Raises EvidenceError.

    A faulty certificate must belong to a row whose K4 (or, for a foreign selector, K7) cell did not pass, and the counts must be
    the record's.
    """
    seen: set[tuple[str, int, int, str]] = set()
    kinds: list[str] = []
    changed = 0
    for number, line in enumerate(lines, 1):
        where = f"ties.jsonl line {number}"
        _require(isinstance(line, dict) and set(line) == _FIELDS, f"{where} must have exactly the fields {sorted(_FIELDS)}")
        certificate = line["certificate"]
        faults = check_certificate(certificate, partial(_record, line["records"], where))
        _require(_has_shape(certificate), f"{where}: {faults[0] if faults else 'no certificate'}")
        _require(isinstance(line["case"], str) and type(line["replay"]) is int, f"{where} names no case and replay")
        gate = (
            _GATE.get(tuple(line["between"]))
            if isinstance(line["between"], list) and all(isinstance(w, str) for w in line["between"])
            else None
        )
        _require(gate is not None, f"{where} compares {line['between']!r}; known: {sorted(_GATE)}")
        key = (line["case"], line["replay"], certificate["row"], str(gate))
        _require(key not in seen, f"{where}: {key[0]} replay {key[1]} row {key[2]} has two certificates for {gate}")
        seen.add(key)
        cell = cells.get((line["case"], certificate["rank"], str(gate)))
        _require(cell is not None, f"{where}: there is no {gate} cell for {line['case']} on rank {certificate['rank']}")
        if gate == "K4":
            changed += 1
            kinds += [member["class"] for member in certificate["members"]]
        exact = not faults and all(member["class"] == "exact_tie" for member in certificate["members"])
        _require(
            exact or (cell or {})["verdict"] != "PASS",
            f"{where}: {faults[0] if faults else 'not an exact tie'}, yet its {gate} cell passed",
        )
    found = {
        "rows_changed": changed,
        "rows_reordered": len(lines) - changed,
        "exact_tie": kinds.count("exact_tie"),
        "rounded_tie": kinds.count("rounded_tie"),
    }
    for name, count in found.items():
        _require(
            record["selection"].get(name) == count,
            f"record.json counts {record['selection'].get(name)} {name}, ties.jsonl shows {count}",
        )
    return len(lines)


def _has_shape(certificate: Any) -> bool:
    """What is read here of a certificate, sound or faulty."""
    if not isinstance(certificate, dict) or any(type(certificate.get(name)) is not int for name in ("row", "rank")):
        return False
    members = certificate.get("members")
    return isinstance(members, list) and all(isinstance(m, dict) and isinstance(m.get("class"), str) for m in members)


def _record(records: Any, where: str, number: int) -> bytes:
    if not isinstance(records, dict) or not isinstance(records.get(str(number)), str):
        raise EvidenceError(f"{where} carries no record of id {number}")
    try:
        return bytes.fromhex(records[str(number)])
    except ValueError:
        raise EvidenceError(f"{where}: the record of id {number} is not hexadecimal") from None


def _require(good: bool, message: str) -> None:
    if not good:
        raise EvidenceError(message)
