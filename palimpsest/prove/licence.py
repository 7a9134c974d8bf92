"""Gate V4: the self-test that licenses this qualifier, found by the digest of the running source.

A kill matrix is JSON: ``{"schema": "qualify.kill_matrix/v1", "verdict": "PASS", "package_digest": ..., "engine": ...,
"mutants": [...], ...}``. It licenses a run when its verdict is PASS and its package digest is that of the source that runs now.
Without one the run says that it is not licensed on this machine; it does not fail for it, because the self-test has to be run
by somebody first.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadConfig
from palimpsest.prove.gates import SEAL, Sheet

SCHEMA = "qualify.kill_matrix/v1"
#: name of the copy in an evidence folder, and of the file in the user's cache
FILE = "kill_matrix.json"
_CAP = 16 << 20


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """A kill matrix and its bytes. Raises BadConfig for a file that is none."""
    if not path.is_file() or path.stat().st_size > _CAP:
        raise BadConfig(f"{path} is not a kill matrix; run: palimpsest qualify --self-test")
    raw = path.read_bytes()
    try:
        tree = json.loads(raw)
    except ValueError:
        tree = None
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        raise BadConfig(f"{path} is not a kill matrix of schema {SCHEMA}; run: palimpsest qualify --self-test")
    return tree, raw


def find(named: Path | None, cache: Path | None) -> bytes | None:
    """Bytes of the matrix to judge: the named file, else the one in the cache folder, else none. Raises BadConfig for a bad
    named file."""
    if named is not None:
        return read(named)[1]
    path = cache / FILE if cache is not None else None
    return path.read_bytes() if path is not None and path.is_file() and path.stat().st_size <= _CAP else None


def licensed(raw: bytes | None, package_digest: str) -> bool:
    """Whether these bytes license the running source."""
    if raw is None:
        return False
    try:
        tree = json.loads(raw)
    except ValueError:
        return False
    return (
        isinstance(tree, dict)
        and tree.get("schema") == SCHEMA
        and tree.get("verdict") == "PASS"
        and tree.get("package_digest") == package_digest
    )


@dataclass(frozen=True)
class Licence:
    """A kill matrix that licenses the running source: its bytes, their sha256, and V4's flag line."""

    raw: bytes
    digest: str
    flags: list[dict[str, Any]]
    FILE = FILE

    @classmethod
    def of(cls, raw: bytes | None, package_digest: str) -> "Licence | None":
        """None when these bytes license nothing."""
        flags, made = cell(raw, package_digest)
        return None if raw is None or made is None else cls(raw, made, flags)


def cell(raw: bytes | None, package_digest: str) -> tuple[list[dict[str, object]], str | None]:
    """(V4's flag line when there is a licence, sha256 of the matrix); ([], None) when there is none."""
    if raw is None or not licensed(raw, package_digest):
        return [], None
    sheet = Sheet(SEAL, 0)
    sheet.expect("V4", 1)
    sheet.cell("V4").passed(1, len(raw))
    return sheet.close(), hashlib.sha256(raw).hexdigest()
