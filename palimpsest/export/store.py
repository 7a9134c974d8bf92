"""The store: compiled programs by key, and the templates they were made from. An entry exists whole or not at all.

``<store>/<key>/`` holds ``program.so``, ``template.json`` and ``meta.json``, which has the hashes of the other two and is read
first. An entry is renamed into place when everything is on the disk; a damaged one is set aside and made again. Half-written
folders (``draft``) are hidden, locked while their process lives, and swept by whoever comes next.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.core.errors import Unavailable

#: layout of an entry
FORMAT = "palimpsest-store-1"
PROGRAM, TEMPLATE, META = "program.so", "template.json", "meta.json"


@dataclass(frozen=True)
class Entry:
    """A complete entry; ``meta`` is what the worker noted (scratch bytes, seconds)."""

    folder: Path
    meta: Mapping[str, Any]

    @property
    def program(self) -> Path:
        return self.folder / PROGRAM

    @property
    def template(self) -> Path:
        return self.folder / TEMPLATE


class Store:
    """A folder of entries. Any number of processes may use it at once."""

    def __init__(self, root: Path):
        self.root = root
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise Unavailable(f"store {root}: {error.strerror}; choose another folder with --store") from None

    def get(self, key: str) -> Entry | None:
        """The entry of ``key``; None when there is none. A damaged entry is set aside, so that it is made again."""
        folder = self.root / key
        if not folder.is_dir():
            return None
        meta = _meta(folder)
        if meta is None or any(_sha256(folder / name) != meta.get(name) for name in (PROGRAM, TEMPLATE)):
            self._set_aside(folder)
            return None
        return Entry(folder, meta)

    def _set_aside(self, folder: Path) -> None:
        damaged = self.root / f".damaged-{folder.name[:16]}-{secrets.token_hex(4)}"
        try:
            os.rename(folder, damaged)
        except OSError:
            return  # another process was first
        shutil.rmtree(damaged, ignore_errors=True)

    def publish(self, key: str, program: Path, template: bytes, facts: Mapping[str, Any]) -> Entry:
        """Move ``program`` and ``template`` in under ``key``. Raises Unavailable when the disk refuses; then nothing is left."""
        try:
            with draft(self.root, ".new-") as work:
                shutil.copyfile(program, work / PROGRAM)
                (work / TEMPLATE).write_bytes(template)
                meta = {**facts, "format": FORMAT, PROGRAM: _sha256(work / PROGRAM), TEMPLATE: _sha256(work / TEMPLATE)}
                (work / META).write_text(json.dumps(meta, sort_keys=True) + "\n")
                for name in (PROGRAM, TEMPLATE, META):
                    sync(work / name)
                sync(work)
                try:
                    os.rename(work, self.root / key)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
        except OSError as error:
            raise Unavailable(f"store {self.root}: {error.strerror}; free space or choose another folder with --store") from None
        found = self.get(key)
        if found is None:
            raise Unavailable(f"store {self.root}: entry {key[:16]} vanished while it was published; run prepare again")
        return found

    def templates(self) -> dict[str, Path]:
        """Digest -> template file, for rebuilding without the model code."""
        found = {}
        for folder in sorted(self.root.iterdir()):
            meta = _meta(folder) if folder.is_dir() and not folder.name.startswith(".") else None
            if meta is not None:
                found[str(meta[TEMPLATE])] = folder / TEMPLATE
        return found


@contextmanager
def draft(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder ``<prefix><12 hexadecimal digits>`` in ``parent``, to be filled and renamed away; what is left of it goes.

    It is locked while this process lives, so drafts of killed processes can be told from those at work, and are removed here.
    Raises OSError.
    """
    _sweep(parent, prefix)
    while True:
        work = parent / f"{prefix}{secrets.token_hex(6)}"
        work.mkdir()
        held = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks: nobody sweeps there
            fcntl.flock(held, fcntl.LOCK_EX)
        if work.is_dir():  # else a sweep came between the folder and its lock
            break
        os.close(held)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(held)


def _sweep(parent: Path, prefix: str) -> None:
    for path in parent.iterdir():
        rest = path.name.removeprefix(prefix)
        if not path.name.startswith(prefix) or len(rest) != 12 or set(rest) - set("0123456789abcdef"):
            continue
        with suppress(OSError):  # it is at work, or another sweep has it
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)


def _meta(folder: Path) -> dict[str, Any] | None:
    try:
        meta = json.loads((folder / META).read_text())
    except (OSError, ValueError):
        return None
    return meta if isinstance(meta, dict) and meta.get("format") == FORMAT else None


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def sync(path: Path) -> None:
    """Wait until ``path`` (a file or a folder) is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
