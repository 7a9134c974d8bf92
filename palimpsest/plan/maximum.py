"""The legal maximum: prepared sizes are the largest over every legal shape, shown by looking at all of them.

A chunk may have any rows from 1 to the prepared ones and any context in pages up to the prepared one. Rounding to tiles, pages
and shares makes some smaller shapes ask for more than a formula suggests; where that happens the prepared size is too small.
Small limits can be enumerated whole, and the formulas are the same at every size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from palimpsest.core.errors import PlanRefused
from palimpsest.core.spec import Limits, Program
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.plan import Plan

INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Largest:
    """The most bytes a buffer needs over all legal shapes, and the first shape that needs them."""

    buffer: str
    nbytes: int
    at: Limits


def shapes(limits: Limits, least: int = 1) -> Iterator[Limits]:
    """Every legal shape inside ``limits``: contexts in pages from ``least`` tokens on, rows from 1 up."""
    for tokens in range(-(-least // limits.page) * limits.page, limits.tokens + 1, limits.page):
        for rows in range(1, min(limits.rows, tokens) + 1):
            yield Limits(tokens, rows, limits.ranks, limits.page)


def legal_maximum(build: Callable[[Limits], Program], limits: Limits, least: int = 1) -> dict[str, Largest]:
    """Buffer -> its largest need over all legal shapes; scratch included, and ``""`` for the sum alive together."""
    found: dict[str, Largest] = {}
    for shape in shapes(limits, least):
        program = build(shape)
        needs = {buffer.name: buffer.nbytes for buffer in program.all_buffers}
        needs[""] = Lifetimes(program).lower_bound if any(b.kind == "reusable" for b in program.all_buffers) else 0
        for name, nbytes in needs.items():
            if name not in found or nbytes > found[name].nbytes:
                found[name] = Largest(name, nbytes, shape)
    return found


def prove_maximum(build: Callable[[Limits], Program], limits: Limits, least: int = 1) -> int:
    """How many legal shapes were looked at; raises PlanRefused when one of them needs more than what ``limits`` prepares."""
    program = build(limits)
    prepared = {buffer.name: buffer.nbytes for buffer in program.all_buffers}
    prepared[""] = Lifetimes(program).lower_bound
    for name, most in legal_maximum(build, limits, least).items():
        if most.nbytes > prepared.get(name, 0):
            raise PlanRefused(
                f"{name or 'the live bytes'} of {program.name}: {most.at} needs {most.nbytes:,} bytes, and {limits} prepares "
                f"{prepared.get(name, 0):,}; take the maximum over the tile remainders in its formula"
            )
    return sum(1 for _ in shapes(limits, least))


@dataclass(frozen=True)
class Reach:
    """The largest offsets a kernel forms for one buffer: bytes from the segment's start, elements inside its largest plane."""

    buffer: str
    byte: int
    element: int

    @property
    def fits_int32(self) -> bool:
        return self.byte <= INT32 and self.element <= INT32


def reaches(program: Program, plan: Plan) -> tuple[Reach, ...]:
    """Per buffer the largest byte and element offset of a plan, largest first.

    Prepared sizes are the maximum over all legal shapes and offsets do not move, so no active shape forms a larger one.
    """
    found = []
    for place in plan.places:
        counts = []
        for plane in program.by_name[place.buffer].planes:
            count = 1
            for extent in plane.shape:
                count *= extent
            counts.append(count)
        found.append(Reach(place.buffer, place.stop - 1, max(counts) - 1))
    return tuple(sorted(found, key=lambda r: (-r.byte, r.buffer)))
