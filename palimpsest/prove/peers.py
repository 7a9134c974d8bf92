"""Reading another rank's memory without asking its transport: the independent half of every gather the gates compare with.

Each rank writes a card (process, memfds, offsets) into the run's private folder; the others read bytes with ``preadv`` from
``/proc/<pid>/fd/<fd>``. Nothing is mapped, so mapped and proportional sizes stay what they are. The page walk is written out here
on purpose and uses
neither ``ranks.layout`` nor ``Comm``: global page p lives on rank p mod W as its page p div W.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palimpsest.core.errors import RankError
from palimpsest.run.arena import Arena

#: bytes read at once
_BLOCK = 4 << 20
_CARD_CAP = 1 << 20


@dataclass(frozen=True)
class Card:
    """Where one rank's planned bytes are.

    segments: kind -> (fd number in that process, mapped bytes)
    places:   buffer -> (kind, offset, bytes)
    """

    rank: int
    pid: int
    segments: dict[str, tuple[int, int]]
    places: dict[str, tuple[str, int, int]]


def write_card(folder: Path, arrangement: str, rank: int, arena: Arena) -> None:
    """Publish this rank's card, by rename, so that a reader never sees half of it."""
    card = {
        "rank": rank,
        "pid": os.getpid(),
        "segments": {kind: [arena.fd(kind), segment.mapped] for kind, segment in arena.segments.items()},
        "places": {p.buffer: [p.kind, p.offset, p.nbytes] for p in arena.plan.places},
    }
    target = folder / f"card-{arrangement}-{rank}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(card))
    os.replace(partial, target)


def read_card(folder: Path, arrangement: str, rank: int) -> Card:
    """The card a rank published. Raises RankError when it is missing or oversized."""
    path = folder / f"card-{arrangement}-{rank}.json"
    if not path.is_file() or path.stat().st_size > _CARD_CAP:
        raise RankError(f"published no card for the {arrangement} arrangement", rank=rank, phase="prepare")
    tree = json.loads(path.read_text())
    return Card(
        rank=tree["rank"], pid=tree["pid"], segments={k: (v[0], v[1]) for k, v in tree["segments"].items()},
        places={k: (v[0], v[1], v[2]) for k, v in tree["places"].items()},
    )  # fmt: skip


class Peer:
    """One rank's bytes, read only. Close it before the rank ends."""

    def __init__(self, card: Card):
        self.card = card
        self._fds: dict[str, int] = {}

    def read(self, buffer: str, start: int, into: np.ndarray) -> None:
        """Fill ``into`` (u8, dense) from byte ``start`` of a buffer."""
        kind, offset, nbytes = self.card.places[buffer]
        assert into.dtype == np.uint8, into.dtype
        assert start + into.nbytes <= nbytes, (buffer, start, into.nbytes, nbytes)
        if kind not in self._fds:
            self._fds[kind] = os.open(f"/proc/{self.card.pid}/fd/{self.card.segments[kind][0]}", os.O_RDONLY | os.O_CLOEXEC)
        flat, done = into.reshape(-1), 0
        while done < flat.nbytes:
            got = os.preadv(self._fds[kind], [flat[done : done + _BLOCK].data], offset + start + done)
            if not got:
                raise RankError(f"its {kind} segment ends inside {buffer}", rank=self.card.rank, phase="prove")
            done += got

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


class Caches:
    """The sharded caches of all ranks as one token-ordered sequence of records.

    page: tokens per page; record: bytes of one token in ``buffer``
    """

    def __init__(self, peers: list[Peer], page: int):
        self.peers, self.page = peers, page

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def shards(self, buffer: str, tokens: int, record: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """``(rank, first page index on that rank, pages u8 [n, page*record])`` over every page with any of ``tokens`` tokens.

        A shard's pages i, i+1, ... are global pages rank + W*i, rank + W*(i+1), ... Arrays are reused: copy what must stay.
        """
        ranks, pages = len(self.peers), -(-tokens // self.page)
        size = self.page * record
        batch = max(1, _BLOCK // size)
        scratch = np.empty((batch, size), np.uint8)
        for rank, peer in enumerate(self.peers):
            own = len(range(rank, pages, ranks))
            for first in range(0, own, batch):
                count = min(batch, own - first)
                peer.read(buffer, first * size, scratch[:count])
                yield rank, first, scratch[:count]

    def pages(self, buffer: str, first: int, stop: int, record: int) -> np.ndarray:
        """Global pages [first, stop) as u8 [n, page*record], freshly made."""
        ranks, size = len(self.peers), self.page * record
        made = np.empty((stop - first, size), np.uint8)
        for rank, peer in enumerate(self.peers):
            start = first + (rank - first) % ranks
            if start >= stop:
                continue
            count = len(range(start, stop, ranks))
            shard = np.empty((count, size), np.uint8)
            peer.read(buffer, start // ranks * size, shard)
            made[start - first :: ranks] = shard
        return made

    def index(self, first: int, stop: int, dim: int, fp8: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Index records of tokens [first, stop) from the persistent caches: values u8 [n, bytes of dim], scales fp32 [n] or None.

        ``first`` lies on a page edge. An fp8 page holds all its values, then all its scales.
        """
        assert first % self.page == 0, (first, self.page)
        width = dim if fp8 else 4 * dim
        record = width + 4 if fp8 else width
        raw = self.pages("index_cache", first // self.page, -(-stop // self.page), record)
        keys = raw[:, : self.page * width].reshape(-1, width)[: stop - first]
        if not fp8:
            return np.ascontiguousarray(keys), None
        scales = np.ascontiguousarray(raw[:, self.page * width :]).view(np.float32).reshape(-1)[: stop - first]
        return np.ascontiguousarray(keys), scales
