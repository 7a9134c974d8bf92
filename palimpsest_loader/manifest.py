"""The manifest: a strict reader of ``manifest.json``. docs/format.md is the contract; nothing here executes or opens another
file.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from palimpsest_loader.errors import BadCore

NAME = "manifest.json"
FORMAT = "palimpsest-core-1"
#: largest manifest that is looked at, and largest number in it
LONGEST, LARGEST = 16 << 20, 1 << 56
DTYPES = ("u8", "e4m3", "bf16", "fp16", "fp32", "fp64", "i32", "i64")
ITEM_BYTES = {"u8": 1, "e4m3": 1, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i32": 4, "i64": 8}
KINDS = ("persistent", "reusable", "staging", "signal")
RUNNERS = ("input", "rows", "append", "gather", "select", "exchange_ids", "barrier", "reduce_output")

Check = Callable[[Any, str], None]


def canonical(tree: Any) -> bytes:
    """The one byte form of a manifest: sorted keys, no spaces, ASCII, one newline at the end."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def seal(tree: dict[str, Any]) -> bytes:
    """The bytes of a manifest with its ``checksum`` filled in."""
    bare = {key: value for key, value in tree.items() if key != "checksum"}
    return canonical(bare | {"checksum": hashlib.sha256(canonical(bare)).hexdigest()})


def read(data: bytes) -> dict[str, Any]:
    """The manifest in ``data``. Raises BadCore for anything but the exact form, a damaged byte included."""
    if len(data) > LONGEST:
        raise BadCore(f"{NAME} has {len(data):,} bytes; at most {LONGEST:,} are read")
    try:
        tree = json.loads(data.decode("ascii"), object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError) as error:
        raise BadCore(f"{NAME} is truncated or damaged: {error}; copy the core again") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
        raise BadCore(f"{NAME} has format {str(found)[:60]!r}; this loader reads {FORMAT!r}: use the loader of that version")
    _form(CORE)(tree, "")
    if seal(tree) != data:
        raise BadCore(f"{NAME} does not match its own checksum: a byte was changed or cut off; copy the core again")
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object names a field twice")
    return found


def _no_float(text: str) -> Any:
    raise ValueError(f"{text[:20]} is not a whole number")


# -- the form, as checks that name where they fail


def _fail(where: str, what: str) -> None:
    raise BadCore(f"{NAME}: {where.lstrip('.') or 'it'} {what}")


def _count(value: Any, where: str) -> None:
    if type(value) is not int or not 0 <= value <= LARGEST:
        _fail(where, f"is {str(value)[:40]!r}; a whole number up to {LARGEST:,} is wanted")


def _text(value: Any, where: str) -> None:
    if type(value) is not str or len(value) > 2000:
        _fail(where, f"is a {type(value).__name__}; a text of at most 2,000 characters is wanted")


def _flag(value: Any, where: str) -> None:
    if type(value) is not bool:
        _fail(where, "must be true or false")


def _digest(value: Any, where: str) -> None:
    if type(value) is not str or len(value) != 64 or set(value) - set("0123456789abcdef"):
        _fail(where, "is not a sha256 in hexadecimal")


def _path(value: Any, where: str) -> None:
    """A relative path of plain words: it cannot leave the folder."""
    words = value.split("/") if type(value) is str else []
    good = 1 <= len(words) <= 3 and all(w and w[0] not in ".-" and all(c.isalnum() or c in "._-" for c in w) for w in words)
    if not good or value == NAME:
        _fail(where, f"is {str(value)[:60]!r}; a plain relative path is wanted")


def _scalar(value: Any, where: str) -> None:
    if type(value) not in (int, str, bool):
        _fail(where, "must be a whole number, a text or a flag")


def _one_of(choices: tuple[str, ...]) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) is not str or value not in choices:
            _fail(where, f"is {str(value)[:40]!r}; it must be one of {', '.join(choices)}")

    return check


def _list(item: Check, most: int = 4096) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) is not list or len(value) > most:
            _fail(where, f"must be a list of at most {most}")
        for i, one in enumerate(value):
            item(one, f"{where}[{i}]")

    return check


def _map(item: Check, key: Check = _text, most: int = 4096) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) is not dict or len(value) > most:
            _fail(where, f"must be an object of at most {most} fields")
        for name, one in value.items():
            key(name, f"{where} name")
            item(one, f"{where}.{name[:60]}")

    return check


def _form(fields: dict[str, Check]) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) is not dict:
            _fail(where, f"is a {type(value).__name__}; an object is wanted")
        missing, unknown = sorted(set(fields) - set(value)), sorted(set(value) - set(fields))
        if missing or unknown:
            _fail(where, f"lacks fields {missing} and has unknown fields {[u[:40] for u in unknown]}")
        for name, one in fields.items():
            one(value[name], f"{where}.{name}")

    return check


PLANE = {"name": _text, "dtype": _one_of(DTYPES), "shape": _list(_count, 8), "offset": _count}
BUFFER = {"kind": _one_of(KINDS), "offset": _count, "nbytes": _count, "planes": _list(_form(PLANE), 8)}
ARGUMENT = {
    "buffer": _text,
    "dtype": _one_of(DTYPES),
    "size": _list(_count, 8),
    "stride": _list(_count, 8),
    "offset": _count,
    "steps": _map(_count),
    "mutated": _flag,
    "dynamic": _map(_text),
}
PASS = {"program": _text, "loops": _list(_one_of(("row", "slot", "head", "key")), 4), "args": _list(_form(ARGUMENT), 64)}
STEP = {
    "name": _text,
    "phase": _text,
    "runner": _one_of(RUNNERS),
    "passes": _list(_form(PASS), 8),
    "numbers": _map(_count),
    "control": _map(_count),
    "roles": _map(_text),
    "planes": _list(_map(_count), 8),
    "reads": _list(_text),
    "writes": _list(_text),
}
ENGINES = ("aoti", "native-avx", "native-amx")
PROGRAM = {"engine": _one_of(ENGINES), "file": _path, "key": _digest, "template": _digest, "scratch_bytes": _count}
TENSOR = {"dtype": _one_of(DTYPES), "shape": _list(_count, 8)}
ENVIRONMENT = {
    "torch": _text,
    "machine": _text,
    "isa": _text,
    "cpu_flags": _list(_text),
    "compiler": _text,
    "device": _one_of(("cpu",)),
}
CORE = {
    "format": _one_of((FORMAT,)),
    "checksum": _digest,
    "name": _text,
    "arithmetic": _text,
    "environment": _form(ENVIRONMENT),
    "program": _digest,
    "plan": _digest,
    "facts": _map(_scalar),
    "limits": _form({"tokens": _count, "rows": _count, "ranks": _count, "page": _count}),
    "backing": _form({"align": _count, "segments": _map(_count, _one_of(KINDS))}),
    "buffers": _map(_form(BUFFER)),
    "inputs": _list(_text),
    "outputs": _list(_text),
    "histories": _list(_text),
    "weights": _form({"files": _list(_path), "tensors": _map(_form(TENSOR))}),
    "programs": _map(_form(PROGRAM)),
    "steps": _list(_form(STEP)),
    "files": _map(_form({"sha256": _digest, "bytes": _count}), _path),
}
