"""Small inputs that once ended in a traceback, an endless loop or a full memory: what fuzzing and reading found."""

import json

import pytest

from palimpsest.core.errors import BadConfig, EvidenceError
from palimpsest.core.spec import Limits
from palimpsest.core.units import parse_bytes, parse_count
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan
from palimpsest.prove import schema, verify
from palimpsest.prove.certificate import SCHEMA, check_certificate
from palimpsest.recipes import default_formats, geometry_from_config, program
from palimpsest.recipes.table import preset_folder


@pytest.fixture(scope="module")
def plan() -> Plan:
    geometry = geometry_from_config(json.loads((preset_folder() / "glm-5.json").read_text()), "x")
    return place(program(geometry, Limits(1 << 16, 64, 1), default_formats(geometry), 0))


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[2Jb", "a\nb", "\0"])
def test_names_in_a_plan_are_printable(plan: Plan, name: str) -> None:
    tree = json.loads(plan.to_json())
    tree["places"][0]["buffer"] = name
    with pytest.raises(BadConfig, match=r"places\[0\]\.buffer"):
        Plan.from_json(json.dumps(tree))


@pytest.mark.parametrize("folder", ["b\udcffd", "a\x1b[2Jb", "x" * 5000])
def test_a_folder_may_have_any_name(folder: str) -> None:
    """Its model plans, and the plan reads back."""
    geometry = geometry_from_config(json.loads((preset_folder() / "glm-5.json").read_text()), folder)
    made = place(program(geometry, Limits(1 << 16, 64, 1), default_formats(geometry), 0))
    assert Plan.from_json(made.to_json()).digest == made.digest


@pytest.mark.parametrize(
    "text", [b'"\\ud800"', b'{"\\udfff":1}', b"9" * 5000, b"[" * 33 + b"]" * 33, b"[" * 100_000, b"1.5", b"NaN"]
)
def test_evidence_text_is_plain_and_shallow(text: bytes) -> None:
    with pytest.raises(EvidenceError, match=r"record\.json|JSON|number"):
        verify._parse(text, "record.json")


@pytest.mark.parametrize(
    ("field", "value"), [("ranks", 0), ("page", 0), ("rows", 1 << 62), ("ranks", 1 << 62), ("tokens", 1 << 40)]
)
def test_limits_of_a_record_bound_the_readers_work(field: str, value: int) -> None:
    limits = {"tokens": 512, "rows": 16, "ranks": 2, "page": 16}
    schema.validate(limits, schema.RECORD["properties"]["limits"], "limits")
    with pytest.raises(EvidenceError, match=f"limits.{field}"):
        schema.validate(limits | {field: value}, schema.RECORD["properties"]["limits"], "limits")


@pytest.mark.parametrize("change", ["exponent", "head", "dot", "heads", "dim"])
def test_a_certificate_cannot_ask_for_two_to_a_billion(change: str) -> None:
    entry = {"id": 0, "mantissa": 1, "exponent": 0, "sha256": "", "bits": "", "class": "exact_tie"}
    certificate = {
        "schema": SCHEMA,
        "row": 0,
        "rank": 0,
        "topk": 1,
        "visible": 4,
        "heads": 1,
        "dim": 1,
        "above": 0,
        "equal": 2,
        "needed": 1,
        "format": "fp8",
        "query": "38",
        "weights": "0000803f",
        "rounding": {"head": -53, "score": -24, "dot": -53},
        "kth": entry,
        "only_base": [1],
        "only_alias": [2],
        "members": [entry | {"id": 1}, entry | {"id": 2}],
    }
    assert not [fault for fault in check_certificate(certificate, lambda token: b"") if "beyond" in fault or "below" in fault]
    if change == "exponent":
        certificate["members"][0]["exponent"] = 10**9
    elif change in ("head", "dot"):
        certificate["rounding"][change] = -(10**9)
    else:
        certificate[change] = 10**9
    faults = check_certificate(certificate, lambda token: b"")
    assert len(faults) == 1
    assert "exponent" in faults[0] or "heads and dim" in faults[0]


@pytest.mark.parametrize("text", ["9" * 400, "9007199254740993", "1" * 16 + "K"])
def test_sizes_are_read_exactly_or_not_at_all(text: str) -> None:
    for parse in (parse_count, parse_bytes):
        with pytest.raises(BadConfig, match="digits"):
            parse(text)
    assert parse_count("999999999999999") == 999_999_999_999_999
