"""The placement problem of one program, identical layers folded: buffers that play one role get one address.

A role is a name without its numbers, a size and an alignment: ``layer12.query`` and ``layer47.query`` are one role when the
same bytes may hold both. Members of a role that are alive together (blocks of a residual stream, two requests) form several
classes. Two classes conflict when any two members do, so a folded placement is a placement of the whole program, and its
lower bound is the same: at every step the live buffers belong to different classes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from palimpsest.core.errors import BadConfig, PlanRefused
from palimpsest.core.units import align_up
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.plan import Pin

_DIGITS = re.compile(r"\d+")


def role_of(name: str) -> str:
    """``"layer12.query"`` -> ``"layer#.query"``: the name without its numbers."""
    return _DIGITS.sub("#", name)


@dataclass(frozen=True)
class Problem:
    """Nodes to place on a line of bytes.

    members:   buffer names of each node, all at one address
    sizes, aligns: bytes of each node
    conflicts: per node the nodes that may not share a byte with it, ascending
    pins:      node -> byte offset
    tied:      base node -> (node, bytes behind the base) placed with it
    first:     nodes placed before all others, in this order: late histories, then early ones
    granule, bound: bytes; no placement has a peak below ``bound``
    """

    members: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    aligns: tuple[int, ...]
    conflicts: tuple[tuple[int, ...], ...]
    pins: dict[int, int]
    tied: dict[int, tuple[tuple[int, int], ...]]
    first: tuple[int, ...]
    granule: int
    bound: int

    @property
    def folded(self) -> bool:
        """Whether any node stands for more than one buffer."""
        return any(len(names) > 1 for names in self.members)

    @cached_property
    def work(self) -> int:
        """Neighbours one pass over all nodes looks at."""
        return sum(map(len, self.conflicts)) + len(self.sizes)

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Nodes whose turn does not depend on the search: pinned, tied to another, or placed first."""
        return frozenset((*self.pins, *self.first, *(node for nodes in self.tied.values() for node, _ in nodes)))

    def peak(self, offsets: Sequence[int]) -> int:
        """End of the last node in whole granules."""
        return align_up(max(at + size for at, size in zip(offsets, self.sizes, strict=True)), self.granule)

    def holds(self, offsets: Sequence[int]) -> bool:
        """Whether no two conflicting nodes share a byte and every pin is kept; for placements made elsewhere."""
        for i, at in enumerate(offsets):
            if at < 0 or at % self.aligns[i] or self.pins.get(i, at) != at:
                return False
            if any(at < offsets[j] + self.sizes[j] and offsets[j] < at + self.sizes[i] for j in self.conflicts[i] if j > i):
                return False
        return all(offsets[node] == offsets[base] + by for base, nodes in self.tied.items() for node, by in nodes)

    def spread(self, offsets: Sequence[int]) -> dict[str, int]:
        """Buffer name -> offset: every member at its node's address."""
        return {name: at for names, at in zip(self.members, offsets, strict=True) for name in names}


def fold(lifetimes: Lifetimes, pins: tuple[Pin, ...] = (), *, whole: bool = True) -> Problem:
    """The problem of the reusable buffers; ``whole=False`` keeps every buffer a node of its own.

    Raises BadConfig for a pin that names no reusable buffer or breaks an alignment, PlanRefused for pins that cannot hold.
    """
    program = lifetimes.program
    asked = _asked(lifetimes, pins)
    classes = _classes(lifetimes, asked) if whole else [[name] for name in lifetimes.names]
    node = {name: k for k, names in enumerate(classes) for name in names}
    first = dict.fromkeys(node[name] for name in (*program.histories[1::2], *program.histories[::2]) if name in node)
    tied: dict[int, list[tuple[int, int]]] = {}
    for pin in asked.values():
        if pin.base:
            tied.setdefault(node[pin.base], []).append((node[pin.buffer], pin.offset))
    bases = set(tied)
    loose = {k for nodes in tied.values() for k, _ in nodes}
    problem = Problem(
        members=tuple(map(tuple, classes)),
        sizes=tuple(program.by_name[names[0]].nbytes for names in classes),
        aligns=tuple(program.by_name[names[0]].align for names in classes),
        conflicts=_conflicts(lifetimes, classes, node),
        pins={node[pin.buffer]: pin.offset for pin in asked.values() if not pin.base},
        tied={base: tuple(nodes) for base, nodes in tied.items()},
        first=tuple(k for k in (*first, *sorted(bases - set(first))) if k not in loose),
        granule=lifetimes.granule,
        bound=lifetimes.lower_bound if lifetimes.names else 0,
    )
    _refuse_pins(lifetimes, problem, asked)
    return problem


def _asked(lifetimes: Lifetimes, pins: tuple[Pin, ...]) -> dict[str, Pin]:
    """Pins by buffer, each either absolute or relative to a buffer that is not relative itself."""
    asked: dict[str, Pin] = {}
    known = set(lifetimes.names)
    for pin in pins:
        for name in (pin.buffer, pin.base) if pin.base else (pin.buffer,):
            if name not in known:
                raise BadConfig(f"pin of {pin.buffer}: program {lifetimes.program.name} has no reusable buffer {name!r}")
        if pin.buffer in asked:
            raise BadConfig(f"{pin.buffer} is pinned twice, to {asked[pin.buffer].offset} and to {pin.offset}")
        align = lifetimes.program.by_name[pin.buffer].align
        if pin.offset < 0 or pin.offset % align:
            raise BadConfig(
                f"{pin.buffer} is pinned to offset {pin.offset}; a multiple of its alignment {align}, 0 or more, is wanted"
            )
        if pin.base and lifetimes.program.by_name[pin.base].align % align:
            raise BadConfig(f"{pin.buffer} (alignment {align}) cannot be pinned to {pin.base}, which has a smaller alignment")
        asked[pin.buffer] = pin
    for pin in pins:
        if pin.base == pin.buffer:
            raise BadConfig(f"{pin.buffer} is pinned to itself")
        if pin.base and asked.get(pin.base, pin).base and pin.base in asked:
            raise BadConfig(f"{pin.buffer} is pinned to {pin.base}, which is pinned to another buffer itself; name that one")
    return asked


def _classes(lifetimes: Lifetimes, asked: dict[str, Pin]) -> list[list[str]]:
    """Buffer names by class, in the order of each class's first buffer in the program."""
    bases = {pin.base for pin in asked.values()}
    roles: dict[tuple[str, int, int, str], list[str]] = {}
    for name in lifetimes.names:
        buffer = lifetimes.program.by_name[name]
        own = name if name in asked or name in bases else ""
        roles.setdefault((role_of(name), buffer.nbytes, buffer.align, own), []).append(name)
    rank = {name: k for k, name in enumerate(lifetimes.names)}
    paired = set(lifetimes.program.histories)
    classes: list[list[str]] = []
    for names in roles.values():
        mine: list[list[str]] = []
        for name in sorted(names, key=lambda n: (lifetimes.ranges[n][0].first, rank[n])):
            for found in mine:
                # whoever of a class is used last is used after all of it, so it is enough to follow that one
                last = max(found, key=lambda n: lifetimes.ranges[n][-1].last)
                if (name not in paired and lifetimes.follows(last, name)) or all(lifetimes.may_share(o, name) for o in found):
                    found.append(name)
                    break
            else:
                mine.append([name])
        classes += mine
    return sorted(classes, key=lambda names: min(rank[name] for name in names))


def _conflicts(lifetimes: Lifetimes, classes: list[list[str]], node: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """Per node its conflicting nodes: alive together in program order, or not ordered in every schedule."""
    masks = [0] * len(classes)
    before: tuple[str, ...] = ()
    for names in lifetimes.live:
        if names is not before:
            alive = {node[name] for name in names}
            bits = 0
            for k in alive:
                bits |= 1 << k
            for k in alive:
                masks[k] |= bits
        before = names
    for early, late in lifetimes.partner.items():
        if early in node and late in node and not lifetimes.may_share(early, late):
            masks[node[early]] |= 1 << node[late]
            masks[node[late]] |= 1 << node[early]
    if not lifetimes.order.one_queue:
        lives = [lifetimes.sequence(names) for names in classes]
        for i in range(len(classes)):
            for j in range(i):
                if not masks[i] >> j & 1 and not lifetimes.chained(lives[i], lives[j]):
                    masks[i] |= 1 << j
                    masks[j] |= 1 << i
    return tuple(tuple(j for j in _bits(mask) if j != i) for i, mask in enumerate(masks))


def _bits(mask: int) -> list[int]:
    """Positions of the ones, ascending."""
    return [k for k, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]


def _refuse_pins(lifetimes: Lifetimes, problem: Problem, asked: dict[str, Pin]) -> None:
    """Pins that put two buffers on common bytes that no order of steps makes safe."""
    at = {name: pin.offset for name, pin in asked.items() if not pin.base}
    at |= {name: at[pin.base] + pin.offset for name, pin in asked.items() if pin.base in at}
    pairs = [(a, b, at[a], at[b]) for a in at for b in at if a < b]
    for name, pin in asked.items():
        if pin.base and pin.base not in at:
            near = {n: p.offset for n, p in asked.items() if p.base == pin.base} | {pin.base: 0}
            pairs += [(name, other, near[name], near[other]) for other in near if other != name]
    size = {name: lifetimes.program.by_name[name].nbytes for name in lifetimes.names}
    for a, b, x, y in pairs:
        shared = min(x + size[a], y + size[b]) - max(x, y)
        pair = lifetimes.clash(a, b) if shared > 0 else None
        if pair:
            raise PlanRefused(
                f"pins put {a} and {b} on {shared:,} common bytes, but step {lifetimes.step_name(pair[0])} uses {a} and step "
                f"{lifetimes.step_name(pair[1])} uses {b}, and {lifetimes.why(a, b)}; move a pin, or order the steps"
            )
