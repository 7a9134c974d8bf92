"""How every file of a checkpoint folder is opened and parsed: bounded, without following links, as data only. Stdlib only.

A file is opened once, relative to a descriptor of its folder, and must be a regular file. A hard link is accepted: it is a
regular file of the folder, it is only ever read, and a change through its other name is seen by ``Identity``. A symbolic link
inside the folder is refused. The folder itself may be reached through a link: its path is the user's own words.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from palimpsest.core.errors import BadCheckpoint

#: integers beyond this cannot be told apart by readers that hold numbers as float64
MAX_INT = 1 << 53
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Identity:
    """What must not change while a file is in use: the inode, its bytes and its times (nanoseconds)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, fd: int) -> "Identity":
        status = os.fstat(fd)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def shown(name: str, limit: int = 80) -> str:
    """A stranger's string for a one-line message: ASCII, escaped, quoted, at most ``limit`` characters long."""
    text = ascii(name[: limit + 1])
    return text if len(text) <= limit and len(name) <= limit else f"{text[: limit - 4]}...{text[0]}"


def open_root(path: str | os.PathLike[str]) -> int:
    """A descriptor of the checkpoint folder ``path``. Raises BadCheckpoint when there is none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BadCheckpoint(f"{shown(str(path))} does not exist; give the folder that holds config.json") from None
    except NotADirectoryError:
        raise BadCheckpoint(f"{shown(str(path))} is not a folder; give the folder that holds config.json") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"cannot open {shown(str(path))}: {_reason(error)}; check the path and its permissions") from None


def open_regular(root_fd: int, name: str) -> int:
    """A read-only descriptor of the regular file ``name`` directly inside the folder ``root_fd``.

    Raises BadCheckpoint for a missing file, a symbolic link, a folder, a FIFO, a socket or a device.
    """
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise BadCheckpoint(f"{shown(name)} is not the name of a file inside the checkpoint folder; shards are plain file names")
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=root_fd)
    except FileNotFoundError:
        raise BadCheckpoint(f"{shown(name)} is not in the checkpoint folder; download it again or correct the index") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(_refusal(root_fd, name, error)) from None
    try:
        _must_be_regular(os.fstat(fd).st_mode, name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refusal(root_fd: int, name: str, error: OSError | ValueError) -> str:
    try:
        link = stat.S_ISLNK(os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_mode)
    except (OSError, ValueError):
        link = False
    if link:
        return f"{shown(name)} is a symbolic link, which may point outside the folder; copy the folder with: cp -rL FOLDER COPY"
    return f"cannot open {shown(name)}: {_reason(error)}; a checkpoint file must be a readable regular file"


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or "error") if isinstance(error, OSError) else str(error)


def _must_be_regular(mode: int, name: str) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
    kind = next((words for test, words in kinds if test(mode)), "not a file")
    raise BadCheckpoint(f"{shown(name)} is {kind}, not a regular file; a checkpoint holds regular files only")


def read_exact(fd: int, count: int, offset: int, name: str) -> bytes:
    """``count`` bytes at ``offset``. Raises BadCheckpoint when the file ends before that."""
    parts: list[bytes] = []
    got = 0
    while got < count:
        part = os.pread(fd, min(_CHUNK, count - got), offset + got)
        if not part:
            raise BadCheckpoint(
                f"{shown(name)} ended at byte {offset + got}, expected {offset + count}; it shrank meanwhile, copy it again"
            )
        parts.append(part)
        got += len(part)
    return b"".join(parts)


def read_small(fd: int, name: str, limit: int) -> bytes:
    """The whole file, at most ``limit`` bytes. Raises BadCheckpoint when it is larger or changes under the read."""
    before = Identity.of(fd)
    if before.size > limit:
        raise BadCheckpoint(
            f"{shown(name)} has {before.size} bytes, more than the {limit} allowed; this is not a model's own {name}"
        )
    data = read_exact(fd, before.size, 0, name)
    check_unchanged(fd, before, name)
    return data


def check_unchanged(fd: int, before: Identity, name: str) -> None:
    """Raises BadCheckpoint when the file behind ``fd`` is not what it was."""
    after = Identity.of(fd)
    if after == before:
        return
    for field in ("device", "inode", "size", "mtime_ns", "ctime_ns"):
        was, now = getattr(before, field), getattr(after, field)
        if was != now:
            raise BadCheckpoint(
                f"{shown(name)} changed while in use: {field} was {was}, is {now}; stop what writes to it and start again"
            )


def file_inside(folder: str | os.PathLike[str], name: str, limit: int) -> bytes:
    """The bytes of the small regular file ``name`` directly inside ``folder``."""
    root_fd = open_root(Path(folder))
    try:
        fd = open_regular(root_fd, name)
        try:
            return read_small(fd, name, limit)
        finally:
            os.close(fd)
    finally:
        os.close(root_fd)


def strict_json(data: bytes, *, name: str, error: type[ValueError] = BadCheckpoint, depth: int = 8, floats: bool = False) -> Any:
    """JSON as data: UTF-8, no duplicate keys, no NaN or Infinity, integers within +-2**53, at most ``depth`` levels.

    ``error`` is raised, in one line, for anything else. Without ``floats`` a fraction or exponent is an error too.
    """

    def fail(reason: str) -> NoReturn:
        raise error(f"{shown(name)}: {reason}; the file is damaged or hostile, download it again")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            again = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            fail(f"key {shown(again)} is there twice")
        return result

    def integer(text: str) -> int:
        if len(text) > 17 or abs(int(text)) > MAX_INT:
            fail(f"integer {text[:24]} is outside +-{MAX_INT}")
        return int(text)

    def fraction(text: str) -> float:
        value = float(text)
        if not floats:
            fail(f"number {text[:24]} is not an integer")
        if value in (float("inf"), float("-inf")):
            fail(f"number {text[:24]} is not finite")
        return value

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        fail(f"byte {problem.start} is not UTF-8")
    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=fraction,
            parse_constant=lambda word: fail(f"{word} is not a number"),
        )
    except json.JSONDecodeError as problem:
        fail(f"not JSON at byte {problem.pos}: {problem.msg}")
    except RecursionError:
        fail(f"nested deeper than {depth} levels")
    deepest = _depth(value, depth)
    if deepest > depth:
        fail(f"nested deeper than {depth} levels")
    return value


def _depth(value: Any, limit: int) -> int:
    """Levels of containers in ``value``, counted to ``limit + 1`` at most; without recursion."""
    level, layer = 0, [value]
    while layer and level <= limit:
        inner = [item for item in layer if isinstance(item, (dict, list))]
        if not inner:
            return level
        level += 1
        layer = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
    return level
