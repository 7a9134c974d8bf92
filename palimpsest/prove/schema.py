"""The shapes of an evidence folder's files, as JSON Schema, and a strict validator for the part of it they use.

Standard library only, so that ``verify`` depends on nothing it judges. The validator knows exactly the keywords below; a schema
that uses another one is our bug and raises KeyError.
"""

import re
from collections.abc import Callable
from typing import Any

from palimpsest.core.errors import EvidenceError

RECORD_SCHEMA = "qualify.record/v1"

_DIGEST = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 1 << 62}
_TEXT = {"type": "string", "maxLength": 4096}
_NAME = {"type": "string", "maxLength": 512}
_VERDICT = {"type": "string", "enum": ["PASS", "INCONCLUSIVE", "FAIL", "ERROR"]}
_HEX_FLOAT = {"type": "string", "pattern": "^(-?0x[01]\\.[0-9a-f]+p[+-][0-9]+|-?inf|nan)$"}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object with exactly these properties, all required."""
    return {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}


def _size(most: int) -> dict[str, Any]:
    """A whole number from 1 on: a reader's work grows with it, so it is bounded."""
    return {"type": "integer", "minimum": 1, "maximum": most}


def _map(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value}


def _list(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def _either(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(choices)}


_NULL = {"type": "null"}
_SCALAR = _either(_TEXT, {"type": "integer"}, {"type": "boolean"}, _NULL)

#: one line of flags.jsonl
FLAG = _object(
    case=_NAME, rank=_COUNT, gate=_NAME, verdict=_VERDICT, n_expected=_COUNT, n_checked=_COUNT, n_bytes=_COUNT,
    worst=_either({"type": "integer"}, _HEX_FLOAT, _NULL), first_failure=_either(_TEXT, _NULL),
)  # fmt: skip

_VIEW = _object(segment=_NAME, offset=_COUNT, bytes=_COUNT, align=_COUNT, steps=_list(_COUNT, minItems=2, maxItems=2))

_ARRANGEMENT = _object(
    digest=_DIGEST, logical=_COUNT, segments=_map(_COUNT), views=_map(_VIEW),
    shared=_list(_list(_NAME, minItems=2, maxItems=2)),
)  # fmt: skip

_CASE = _object(
    id=_NAME, name=_NAME, regime=_NAME, poison=_list(_NAME, minItems=1),
    steps=_list(_object(history=_COUNT, rows=_COUNT, regime=_NAME, audited=_list(_COUNT)), minItems=1),
    minima=_map(_COUNT), planted=_list(_NAME), verdict=_VERDICT, start_ns=_COUNT, end_ns=_COUNT,
)  # fmt: skip

#: record.json
RECORD = _object(
    schema={"type": "string", "enum": [RECORD_SCHEMA]},
    run_id={"type": "string", "pattern": "^[0-9a-f]{12}$"},
    started_utc=_NAME,
    claim=_TEXT,
    non_claims=_list(_TEXT, minItems=1),
    gates=_list(_NAME, minItems=1),
    gates_absent=_list(_NAME),
    kernels=_list(
        _object(
            op=_NAME,
            name=_NAME,
            form=_NAME,
            file=_NAME,
            sha256={"type": "string", "pattern": "^([0-9a-f]{64})?$"},
            steps=_list(_NAME, minItems=1),
            gates_without=_list(_NAME),
            gates_extra=_list(_NAME),
            because=_TEXT,
        )
    ),
    argv=_list(_TEXT),
    cwd_rel=_TEXT,
    env=_map(_TEXT),
    env_digest=_DIGEST,
    source=_object(
        kind=_NAME,
        commit=_either(_NAME, _NULL),
        tree=_either(_NAME, _NULL),
        dirty={"type": "boolean"},
        package_digest=_DIGEST,
        modules=_map(_DIGEST),
    ),
    checkpoint=_object(
        name=_NAME,
        revision=_either(_NAME, _NULL),
        layer=_COUNT,
        synthetic={"type": "boolean"},
        seed=_either({"type": "integer"}, _NULL),
        config_digest=_DIGEST,
        files=_list(_object(name=_NAME, bytes=_COUNT, sha256=_DIGEST)),
        tensors=_map(_DIGEST),
    ),
    geometry=_map(_either(_SCALAR, {"type": "array"}, {"type": "object"})),
    limits=_object(tokens=_size(1 << 31), rows=_size(1 << 20), ranks=_size(1 << 12), page=_size(1 << 20)),
    profile=_NAME,
    engine=_NAME,
    facts=_map(_SCALAR),
    steps=_list(_NAME, minItems=1),
    plan=_object(base=_ARRANGEMENT, alias=_ARRANGEMENT),
    machine=_map(_SCALAR),
    libraries=_map(_object(version=_NAME, sha256=_either(_DIGEST, _NULL))),
    numerics=_map(_SCALAR),
    seeds=_map({"type": "integer"}),
    cases=_list(_CASE, minItems=1),
    flags=_object(file=_NAME, sha256=_DIGEST, cells=_COUNT),
    allocation=_map(_either(_COUNT, _map(_COUNT), {"type": "array"})),
    selection=_map(_COUNT),
    density=_map(_map(_COUNT)),
    power=_map(_map(_COUNT)),
    capacity=_map(_map(_COUNT)),
    schedule=_list(_object(name=_NAME, phase=_NAME, scope=_NAME, reads=_list(_NAME), writes=_list(_NAME)), minItems=1),
    events=_object(file=_NAME, sha256=_DIGEST, lines=_COUNT),
    output=_map(_either(_SCALAR, _HEX_FLOAT)),
    sparse=_object(layers=_list(_COUNT), rows_selecting=_COUNT),
    bytes=_map(_SCALAR),
    lint=_map(_COUNT),
    elapsed_ns=_map(_COUNT),
    exit=_COUNT,
    gates_verdict=_VERDICT,
    verdict=_VERDICT,
    self_test=_either(_DIGEST, _NULL),
    previous=_either(_DIGEST, _NULL),
    failure=_either(_TEXT, _NULL),
)

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def validate(value: Any, schema: dict[str, Any], where: str) -> None:
    """Raise EvidenceError naming the first place where ``value`` does not have the shape of ``schema``.

    where: the path of ``value``, for the message (``record.json: plan.base``)
    """
    if "anyOf" in schema:
        _any_of(value, schema["anyOf"], where)
        return
    kind = schema["type"]
    if kind == "integer":
        _check(type(value) is int, where, f"is {_shown(value)}, not an integer")
        _integer(value, schema, where)
        return
    _check(isinstance(value, _TYPES[kind]), where, f"is {_shown(value)}, not of type {kind}")
    _LATER[kind](value, schema, where)


def _any_of(value: Any, choices: list[dict[str, Any]], where: str) -> None:
    reasons = []
    for choice in choices:
        try:
            validate(value, choice, where)
            return
        except EvidenceError as error:
            reasons.append(str(error))
    raise EvidenceError(reasons[0])


def _integer(value: int, schema: dict[str, Any], where: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    _check(low is None or value >= low, where, f"is {value}, below {low}")
    _check(high is None or value <= high, where, f"is {value}, above {high}")


def _string(value: str, schema: dict[str, Any], where: str) -> None:
    limit, pattern, choices = schema.get("maxLength"), schema.get("pattern"), schema.get("enum")
    _check(limit is None or len(value) <= limit, where, f"has {len(value)} characters, more than {limit}")
    _check(pattern is None or re.search(pattern, value) is not None, where, f"is {_shown(value)}, not of the form {pattern}")
    _check(choices is None or value in choices, where, f"is {_shown(value)}, not one of {choices}")


def _object_of(value: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        _check(name in value, where, f"lacks {name!r}")
    for name, item in value.items():
        if name in properties:
            validate(item, properties[name], f"{where}.{name}")
        elif more is False:
            raise EvidenceError(f"{where} has {name!r}, which the format does not know")
        elif isinstance(more, dict):
            validate(item, more, f"{where}.{name}")


def _array_of(value: list[Any], schema: dict[str, Any], where: str) -> None:
    low, high = schema.get("minItems"), schema.get("maxItems")
    _check(low is None or len(value) >= low, where, f"has {len(value)} items, fewer than {low}")
    _check(high is None or len(value) <= high, where, f"has {len(value)} items, more than {high}")
    if "items" in schema:
        for index, item in enumerate(value):
            validate(item, schema["items"], f"{where}[{index}]")


def _nothing(value: Any, schema: dict[str, Any], where: str) -> None:
    """Booleans and null have no further keywords."""


_LATER: dict[str, Callable[[Any, dict[str, Any], str], None]] = {
    "object": _object_of,
    "array": _array_of,
    "string": _string,
    "boolean": _nothing,
    "null": _nothing,
}


def _check(good: bool, where: str, message: str) -> None:
    if not good:
        raise EvidenceError(f"{where} {message}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
