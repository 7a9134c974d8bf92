"""Replay the tie certificates of an evidence folder with Python integers and the records they carry."""

from typing import Any

from palimpsest.core.errors import EvidenceError
from palimpsest.prove.certificate import check_certificate

_FIELDS = {"case", "replay", "certificate", "records"}


def check_certificates(lines: list[dict[str, Any]], record: dict[str, Any], cells: dict[tuple[str, int, str], dict[str, Any]]) -> int:
    """Check every certificate; returns how many. Raises EvidenceError.

    A faulty certificate must belong to a row whose K4 cell did not pass, and the counts must be the record's.
    """
    seen: set[tuple[str, int, int]] = set()
    kinds: list[str] = []
    for number, line in enumerate(lines, 1):
        where = f"ties.jsonl line {number}"
        _require(isinstance(line, dict) and set(line) == _FIELDS, f"{where} must have exactly the fields {sorted(_FIELDS)}")
        certificate = line["certificate"]
        faults = check_certificate(certificate, lambda i, records=line["records"], where=where: _record(records, i, where))
        _require(isinstance(certificate, dict) and "rank" in certificate, f"{where}: {faults[0] if faults else 'no rank'}")
        key = (line["case"], line["replay"], certificate["row"])
        _require(key not in seen, f"{where}: {key[0]} replay {key[1]} row {key[2]} has two certificates")
        seen.add(key)
        cell = cells.get((line["case"], certificate["rank"], "K4"))
        _require(cell is not None, f"{where}: there is no K4 cell for {line['case']} on rank {certificate['rank']}")
        kinds += [member["class"] for member in certificate["members"]]
        exact = not faults and all(member["class"] == "exact_tie" for member in certificate["members"])
        _require(exact or (cell or {})["verdict"] != "PASS", f"{where}: {faults[0] if faults else 'not an exact tie'}, yet its K4 cell passed")
    found = {"rows_changed": len(lines), "exact_tie": kinds.count("exact_tie"), "rounded_tie": kinds.count("rounded_tie")}
    for name, count in found.items():
        _require(record["selection"].get(name) == count, f"record.json counts {record['selection'].get(name)} {name}, ties.jsonl shows {count}")
    return len(lines)


def _record(records: Any, number: int, where: str) -> bytes:
    if not isinstance(records, dict) or not isinstance(records.get(str(number)), str):
        raise EvidenceError(f"{where} carries no record of id {number}")
    try:
        return bytes.fromhex(records[str(number)])
    except ValueError:
        raise EvidenceError(f"{where}: the record of id {number} is not hexadecimal") from None


def _require(good: bool, message: str) -> None:
    if not good:
        raise EvidenceError(message)
