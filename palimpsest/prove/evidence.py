"""The evidence folder: written beside its final place, published by one rename, never overwritten.

    evidence/<utc>-<run id>/
      record.json  flags.jsonl  ties.jsonl  events.jsonl  log.txt  [kill_matrix.json]  MANIFEST.sha256

Standard library only. A run that is interrupted or meets a full disk leaves nothing behind; a run that fails its gates is
published like any other.
"""

import datetime
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from palimpsest.core.canon import canonical
from palimpsest.core.errors import Unavailable

MANIFEST = "MANIFEST.sha256"
FILES = ("record.json", "flags.jsonl", "ties.jsonl", "events.jsonl", "log.txt")


def new_run_id() -> str:
    """Twelve random hexadecimal digits."""
    return secrets.token_hex(6)


def utc_stamp() -> str:
    """Now, as 20260131T235959Z."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


def file_digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal, read in blocks."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def manifest_text(folder: Path, names: Iterable[str]) -> str:
    """One line per file, sorted by name: sha256, two spaces, name."""
    return "".join(f"{file_digest(folder / name)}  {name}\n" for name in sorted(names))


class EvidenceFolder:
    """A folder under construction. Use as a context manager; ``publish`` makes it visible, leaving without it removes everything.

    root:  the directory that holds all runs (made when missing)
    Raises Unavailable when the disk is full or the place cannot be written.
    """

    def __init__(self, root: Path, run_id: str):
        self.root, self.run_id = root, run_id
        self.final = root / f"{utc_stamp()}-{run_id}"
        self.work = root / f".partial-{run_id}"
        self.published = False
        self._made_root = False

    def __enter__(self) -> "EvidenceFolder":
        try:
            self._made_root = not self.root.exists()
            self.root.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(mode=0o700)  # the log holds whatever the ranks printed
        except OSError as error:
            raise _unavailable(error, self.root) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.published:
            return
        shutil.rmtree(self.work, ignore_errors=True)
        if self._made_root and self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unavailable(error, self.root) from error

    def write(self, name: str, data: str | bytes) -> None:
        """Write one file of the folder, durably. Raises Unavailable."""
        raw = data.encode() if isinstance(data, str) else data
        try:
            with (self.work / name).open("wb") as target:
                target.write(raw)
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            raise _unavailable(error, self.root) from error

    def write_lines(self, name: str, rows: Iterable[object]) -> None:
        """Write one canonical JSON value per line."""
        self.write(name, "".join(canonical(row) + "\n" for row in rows))

    def digest(self, name: str) -> str:
        """sha256 of a file already written."""
        return file_digest(self.work / name)

    def publish(self) -> Path:
        """Write the manifest and rename the folder to its final name, which must not exist. Returns that path."""
        names = [p.name for p in self.work.iterdir()]
        self.write(MANIFEST, manifest_text(self.work, names))
        try:
            if self.final.exists():
                raise FileExistsError(errno.EEXIST, "evidence is never overwritten", str(self.final))
            os.rename(self.work, self.final)
        except OSError as error:
            raise _unavailable(error, self.root) from error
        self.published = True
        return self.final


def previous_digest(root: Path, plan_digest: str) -> str | None:
    """sha256 of the newest published record.json in ``root`` that names the same plan digest, or None."""
    if not root.is_dir():
        return None
    for folder in sorted((p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), reverse=True):
        record = folder / "record.json"
        if record.is_file() and f'"digest":"{plan_digest}"' in record.read_text(errors="replace"):
            return file_digest(record)
    return None


def _unavailable(error: OSError, root: Path) -> Unavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(f"evidence folder {root}: the disk is full; free some space or name another place with --evidence")
    return Unavailable(f"evidence folder {root}: {error.strerror or error}; name a writable place with --evidence")
