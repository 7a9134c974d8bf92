"""Plan: where every buffer lies. A frozen value with a text form, a strict JSON reader and a digest.

A plan is only a claim. ``check`` re-derives every number in it from the program.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from palimpsest.core.canon import canonical, digest, plain
from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import KINDS, Limits
from palimpsest.core.units import format_bytes

#: names the JSON form; a reader refuses any other
FORMAT = "palimpsest-plan-2"
#: no offset or size is larger; leaves room for sums in 64 bits
LARGEST = 1 << 56
#: characters of the longest plan text a reader looks at
LONGEST_TEXT = 64 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """One buffer: bytes [offset, offset + nbytes) of the segment of its kind, alive from step ``first`` to step ``last``.

    begin, end: the same two steps by number, counted from 1 in program order; 0 is the start, one more than the last step
                is the end
    """

    buffer: str
    kind: str
    offset: int
    nbytes: int
    align: int
    first: str
    last: str
    begin: int
    end: int

    @property
    def stop(self) -> int:
        """The first byte behind the buffer."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Segment:
    """All bytes of one kind on one rank: one mapping."""

    kind: str
    nbytes: int


@dataclass(frozen=True)
class Pin:
    """A place somebody asked for: ``buffer`` at byte ``offset`` of its segment, or that far behind the start of ``base``."""

    buffer: str
    offset: int
    base: str = ""


@dataclass(frozen=True)
class Handover:
    """``late`` takes bytes [start, stop) of the reusable segment over from ``early``: one certificate.

    chains: per queue in which ``early`` was used, the steps from its last access there to the first write of ``late``; each
            step is a later one of the same queue as the step before it, or waits for it (``after``). ``start`` stands for
            the caller's inputs. Empty when nothing orders the two: a plan that says so is refused.
    """

    early: str
    late: str
    start: int
    stop: int
    chains: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Overlap:
    """Two reusable buffers share bytes [start, stop) of the segment; ``ordered_by`` says which order of steps makes it safe."""

    early: str
    late: str
    start: int
    stop: int
    ordered_by: str


@dataclass(frozen=True)
class Plan:
    """Offsets of one program on one rank; the same on every rank.

    program, program_digest: the program it was made for
    reuse:       ``on``, or ``off`` when the early history has bytes of its own behind all others
    placer:      id of the algorithm, and of the package when it is not ours
    pins:        the places somebody asked for, all kept
    places:      one per buffer, in the program's order
    handovers:   the certificates: who takes bytes from whom, and the chain of steps that orders it in every schedule
    lower_bound: largest sum of reusable bytes alive together; no placement of this program is smaller
    """

    program: str
    program_digest: str
    limits: Limits
    reuse: str
    placer: str
    pins: tuple[Pin, ...]
    segments: tuple[Segment, ...]
    places: tuple[Place, ...]
    handovers: tuple[Handover, ...]
    lower_bound: int

    @cached_property
    def by_name(self) -> dict[str, Place]:
        return {place.buffer: place for place in self.places}

    @cached_property
    def by_kind(self) -> dict[str, Segment]:
        return {segment.kind: segment for segment in self.segments}

    @cached_property
    def overlaps(self) -> tuple[Overlap, ...]:
        """Every pair of reusable buffers that share bytes, in the order they begin to live; quadratic in the buffers."""
        inside = sorted((p for p in self.places if p.kind == "reusable"), key=lambda p: (p.begin, p.buffer))
        direct = {(h.early, h.late): h.chains[0] for h in reversed(self.handovers) if h.chains}
        found = []
        for i, early in enumerate(inside):
            for late in inside[i + 1 :]:
                start, stop = max(early.offset, late.offset), min(early.stop, late.stop)
                if start < stop:
                    chain = direct.get((early.buffer, late.buffer), (early.last, late.first))
                    order = (
                        f"{chain[0]} before {chain[-1]}" if early.end < late.begin else f"lives that alternate from {late.first}"
                    )
                    found.append(Overlap(early.buffer, late.buffer, start, stop, order))
        return tuple(found)

    @property
    def peak(self) -> int:
        """Bytes of the reusable segment."""
        segment = self.by_kind.get("reusable")
        return segment.nbytes if segment else 0

    @property
    def ratio(self) -> float:
        """Peak over lower bound; 1.0 cannot be improved."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    @property
    def total(self) -> int:
        """Logical bytes of one rank: the sum of its segments."""
        return sum(segment.nbytes for segment in self.segments)

    @cached_property
    def digest(self) -> str:
        """sha256 of the JSON form."""
        return digest(self._tree())

    def to_json(self) -> str:
        """Canonical JSON: equal texts exactly when the plans are equal."""
        return canonical(self._tree())

    def _tree(self) -> dict[str, Any]:
        return {"format": FORMAT, **plain(self)}

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan a text describes. Raises BadConfig for anything but the exact form.

        Says nothing about safety: ``check`` does.
        """
        tree = _fields(_parse(text), "plan", {"format", *(f.name for f in dataclasses.fields(cls))})
        if tree["format"] != FORMAT:
            raise BadConfig(f"plan has format {tree['format']!r}; this version reads {FORMAT!r}")
        if tree["reuse"] not in ("on", "off"):
            raise BadConfig(f"plan field reuse is {tree['reuse']!r}; it is 'on' or 'off'")
        return cls(
            program=_text(tree["program"], "program"),
            program_digest=_text(tree["program_digest"], "program_digest"),
            limits=_record(Limits, tree["limits"], "limits"),
            reuse=tree["reuse"],
            placer=_text(tree["placer"], "placer"),
            pins=_records(Pin, tree["pins"], "pins"),
            segments=_records(Segment, tree["segments"], "segments"),
            places=_records(Place, tree["places"], "places"),
            handovers=_records(Handover, tree["handovers"], "handovers"),
            lower_bound=_size(tree["lower_bound"], "lower_bound"),
        )

    def text(self) -> str:
        """One line per segment and place, for logs and diffs."""
        lines = [f"plan of {self.program}, reuse {self.reuse}, placer {self.placer}, digest {self.digest}"]
        for segment in self.segments:
            lines.append(f"segment {segment.kind}: {segment.nbytes:,} B ({format_bytes(segment.nbytes)})")
            lines += [
                f"  [{p.offset:>14,} {p.stop:>14,})  {p.buffer}: {p.nbytes:,} B, {p.first} .. {p.last}"
                for p in sorted(self.places, key=lambda p: (p.offset, p.buffer))
                if p.kind == segment.kind
            ]
        lines.append(f"peak {self.peak:,} B, lower bound {self.lower_bound:,} B, {len(self.handovers)} hand-overs")
        return "\n".join(lines)


def _parse(text: str) -> Any:
    if len(text) > LONGEST_TEXT:
        raise BadConfig(f"plan text has {len(text):,} characters; the longest allowed is {LONGEST_TEXT:,}")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"plan is not canonical JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object names a field twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text[:40]} is not a whole number")


def _fields(tree: Any, where: str, wanted: set[str]) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise BadConfig(f"{where} is a {type(tree).__name__}; an object with {sorted(wanted)} is wanted")
    missing, unknown = sorted(wanted - set(tree)), sorted(set(tree) - wanted)
    if missing or unknown:
        raise BadConfig(f"{where}: fields missing {missing}, unknown {[name[:40] for name in unknown]}")
    return tree


def _text(value: Any, where: str) -> str:
    if type(value) is not str or len(value) > 1000:
        raise BadConfig(f"plan field {where} is a {type(value).__name__}; a text of at most 1,000 characters is wanted")
    if not value.isprintable():
        raise BadConfig(f"plan field {where} is {value[:40]!a}; a name has no control characters and no lone surrogates")
    return value


def _size(value: Any, where: str) -> int:
    if type(value) is not int:
        raise BadConfig(f"plan field {where} is a {type(value).__name__}; a whole number is wanted")
    if not 0 <= value <= LARGEST:
        raise BadConfig(f"plan field {where} is {str(value)[:40]}; it must lie between 0 and {LARGEST:,}")
    return value


def _chains(value: Any, where: str) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or any(not isinstance(chain, list) for chain in value):
        raise BadConfig(f"plan field {where} is a {type(value).__name__}; a list of lists of step names is wanted")
    return tuple(tuple(_text(name, where) for name in chain) for chain in value)


def _record(kind: Callable[..., T], tree: Any, where: str) -> T:
    types = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = _fields(tree, where, set(types))
    read: dict[Any, Callable[[Any, str], Any]] = {int: _size, str: _text}
    made = kind(**{n: read.get(t, _chains)(values[n], f"{where}.{n}") for n, t in types.items()})
    if values.get("kind", "reusable") not in KINDS:
        raise BadConfig(f"plan field {where}.kind is {values['kind'][:40]!r}; kinds are {', '.join(KINDS)}")
    return made


def _records(kind: Callable[..., T], tree: Any, where: str) -> tuple[T, ...]:
    if not isinstance(tree, list):
        raise BadConfig(f"plan field {where} is a {type(tree).__name__}; a list is wanted")
    return tuple(_record(kind, item, f"{where}[{i}]") for i, item in enumerate(tree))
