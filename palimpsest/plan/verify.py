"""``palimpsest verify plan.json``: every range, size and certificate of a plan file, with the standard library alone.

Imports nothing of palimpsest and trusts nothing of the planner: the file carries the program (buffers and steps) and the plan,
and every statement of the plan is derived again from the program. The file alone also runs: ``python verify.py plan.json``.
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

FILE_FORMAT, PLAN_FORMAT = "palimpsest-plan-file-1", "palimpsest-plan-2"
LONGEST_FILE = 256 << 20
LARGEST = 1 << 56
KINDS = ("weights", "persistent", "reusable", "staging", "table", "signal")
ITEM_BYTES = {"u8": 1, "e4m3": 1, "bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "fp64": 8, "i64": 8}
#: alignment of the implicit buffer that holds a step's scratch
SCRATCH_ALIGN = 64
#: faults listed in a report; the rest are counted
MOST_FAULTS = 20


@dataclass
class PlanReport:
    """What a plan file says and whether it is true.

    faults:  sentences, empty when the plan is safe and truthful
    checked: how many of each thing were looked at
    """

    path: str
    program: str = ""
    digest: str = ""
    placer: str = ""
    peak: int = 0
    lower_bound: int = 0
    faults: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.faults

    def lines(self) -> list[str]:
        """The report as a person reads it."""
        counts = ", ".join(f"{n:,} {what}" for what, n in self.checked.items())
        head = [f"{self.path}: {'every statement holds' if self.ok else 'REFUSED'}"]
        if self.program:
            ratio = self.peak / self.lower_bound if self.lower_bound else 1.0
            head += [f"  plan of {self.program} by {self.placer}, digest {self.digest}", f"  checked {counts}"]
            head += [f"  peak {self.peak:,} B, lower bound {self.lower_bound:,} B, ratio {ratio:.4f}"]
        more = len(self.faults) - MOST_FAULTS
        return head + [f"  {fault}" for fault in self.faults[:MOST_FAULTS]] + ([f"  and {more:,} more"] if more > 0 else [])


class Refusal(ValueError):
    """The file is not what it must be; nothing behind this point can be checked."""


def verify_plan_file(path: str | Path) -> PlanReport:
    """The report on a plan file, as ``palimpsest plan --output`` writes it. Never raises for a bad file: the report says so."""
    try:
        file = Path(path)
        if file.stat().st_size > LONGEST_FILE:
            raise Refusal(f"the file has {file.stat().st_size:,} bytes; the longest allowed is {LONGEST_FILE:,}")
        tree = json.loads(file.read_text("utf-8"), object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float)
    except OSError as error:
        return PlanReport(str(path), faults=[f"cannot read the file: {error.strerror or error}"])
    except (ValueError, RecursionError) as error:
        return PlanReport(str(path), faults=[str(error)[:500]])
    return verify_tree(tree, str(path))


def verify_tree(tree: Any, path: str = "(memory)") -> PlanReport:
    """The report on a parsed plan file."""
    report = PlanReport(path)
    try:
        _verify(_object(tree, "file", ("format", "program", "plan")), report)
    except (ValueError, RecursionError) as error:
        report.faults.append(str(error)[:500])
    return report


class Buffer(NamedTuple):
    name: str
    kind: str
    nbytes: int
    align: int


class Step(NamedTuple):
    name: str
    queue: str
    scope: str
    after: tuple[str, ...]
    access: tuple[tuple[str, str], ...]


class Life(NamedTuple):
    """One life of a buffer: positions of its accesses, ascending; -1 is the start and the number of steps is the end."""

    accesses: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.accesses[0]

    @property
    def last(self) -> int:
        return self.accesses[-1]


def _verify(tree: dict[str, Any], report: PlanReport) -> None:
    if tree["format"] != FILE_FORMAT:
        raise Refusal(f"the file has format {str(tree['format'])[:60]!r}; this verifier reads {FILE_FORMAT!r}")
    program = _object(tree["program"], "program", ("name", "limits", "buffers", "steps", "inputs", "outputs", "histories"))
    plan = _object(tree["plan"], "plan", ("format", "places", "segments", "pins", "handovers", "lower_bound", "reuse"))
    if plan["format"] != PLAN_FORMAT:
        raise Refusal(f"the plan has format {str(plan['format'])[:60]!r}; this verifier reads {PLAN_FORMAT!r}")
    report.program, report.placer = _text(program["name"], "program name"), _text(plan.get("placer"), "placer")
    report.digest = _digest(plan)
    checker = _Checker(program, plan, report.faults)
    checker.run()
    report.peak, report.lower_bound = checker.segments.get("reusable", 0), _count(plan.get("lower_bound"), "lower_bound")
    report.checked = {
        "buffers": len(checker.buffers), "steps": len(checker.steps), "hand-overs": len(checker.given),
        "links": checker.links,
    }  # fmt: skip


class _Checker:
    """One program and one plan, read strictly; ``run`` appends every untrue statement to ``faults``."""

    def __init__(self, program: dict[str, Any], plan: dict[str, Any], faults: list[str]):
        self.program, self.plan, self.faults, self.say, self.links = program, plan, faults, faults.append, 0
        self.steps = [_step(item) for item in _list(program["steps"], "steps")]
        self.at = {step.name: i for i, step in enumerate(self.steps)}
        self.buffers = _buffers(program, self.steps)
        self.limits = _object(program["limits"], "limits", ("tokens", "rows", "ranks", "page"))
        self.ranks = _count(self.limits["ranks"], "ranks")
        if len(self.at) != len(self.steps):
            raise Refusal("two steps have one name")
        self._references()
        self.clocks = self._tick()
        places = [_object(p, "place", ("buffer", "kind", "offset", "nbytes")) for p in _list(plan["places"], "places")]
        self.places = {_text(p["buffer"], "place"): p for p in places}
        segments = [_object(s, "segment", ("kind", "nbytes")) for s in _list(plan["segments"], "segments")]
        self.segments = {_text(s["kind"], "segment"): _count(s["nbytes"], "segment") for s in segments}
        self.pins = [_object(p, "pin", ("buffer", "offset", "base")) for p in _list(plan["pins"], "pins")]
        self.given = [
            _object(h, "hand-over", ("early", "late", "start", "stop", "chains")) for h in _list(plan["handovers"], "handovers")
        ]

    def run(self) -> None:
        self._statements()
        if self._ranges():
            self._apart()
            lives = self._lives()
            if lives is not None:
                self._handovers(lives)
                self._histories(lives)
                self._bound()

    def _references(self) -> None:
        for i, step in enumerate(self.steps):
            for _, name in step.access:
                if name not in self.buffers:
                    raise Refusal(f"step {step.name} uses {name}, which the program does not declare")
            for name in step.after:
                if self.at.get(name, i) >= i:
                    raise Refusal(f"step {step.name} waits for {name}, which does not come before it")
        for what in ("inputs", "outputs", "histories"):
            for name in _list(self.program.get(what), what):
                if _text(name, what) not in self.buffers:
                    raise Refusal(f"{what}: the program does not declare {name!r}")

    def _tick(self) -> list[dict[str, int]]:
        """For every step, per queue the last position that is finished once it is."""
        clocks: list[dict[str, int]] = []
        latest: dict[str, dict[str, int]] = {}
        for i, step in enumerate(self.steps):
            clock = dict(latest.get(step.queue, {}))
            for name in step.after:
                for queue, seen in clocks[self.at[name]].items():
                    clock[queue] = max(clock.get(queue, -1), seen)
            clock[step.queue] = i
            latest[step.queue] = clock
            clocks.append(clock)
        return clocks

    def ordered(self, a: int, b: int) -> bool:
        """Whether position ``a`` is finished before ``b`` begins in every schedule."""
        if a < 0 or b >= len(self.steps):
            return a < b
        return b >= 0 and a < b and self.clocks[b].get(self.steps[a].queue, -1) >= a

    def _statements(self) -> None:
        """Names, digest, limits and pins."""
        for what, found, right in (
            ("program", self.plan.get("program"), self.program["name"]), ("limits", self.plan.get("limits"), self.limits),
            ("program digest", self.plan.get("program_digest"), _digest(self.program)),
        ):  # fmt: skip
            if found != right:
                self.say(f"the plan was made for {what} {str(found)[:80]}; the program in the file has {str(right)[:80]}")
        if self.plan.get("reuse") not in ("on", "off"):
            self.say(f"reuse is {str(self.plan.get('reuse'))[:20]!r}; it is 'on' or 'off'")
        for pin in self.pins:
            wanted, base, name = _count(pin["offset"], "pin"), _text(pin["base"], "pin"), _text(pin["buffer"], "pin")
            if base:
                wanted += _count(self.places.get(base, {}).get("offset"), f"offset of {base}")
            if self.places.get(name, {}).get("offset") != wanted:
                self.say(f"{name} is pinned to {wanted:,} and does not lie there")

    def _ranges(self) -> bool:
        """Every buffer once, with its size and alignment, inside the segment of its kind. False stops the rest."""
        before = len(self.faults)
        if len(self.places) != len(self.plan["places"]) or set(self.places) != set(self.buffers):
            missing, extra = sorted(set(self.buffers) - set(self.places))[:4], sorted(set(self.places) - set(self.buffers))[:4]
            self.say(
                f"the plan must place every buffer once: missing {missing}, unknown {extra}, {len(self.plan['places'])} places"
            )
            return False
        stops: dict[str, int] = {}
        widest: dict[str, int] = {}
        for name, place in self.places.items():
            buffer, offset = self.buffers[name], _count(place.get("offset"), f"offset of {name}")
            for key, right in (("kind", buffer.kind), ("nbytes", buffer.nbytes), ("align", buffer.align)):
                if place.get(key) != right:
                    self.say(f"the plan gives {name} {key} {str(place.get(key))[:40]}; the program declares {right}")
            if offset % buffer.align:
                self.say(f"{name} lies at offset {offset:,}, which is no multiple of its alignment {buffer.align}")
            stops[buffer.kind] = max(stops.get(buffer.kind, 0), offset + buffer.nbytes)
            widest[buffer.kind] = max(widest.get(buffer.kind, 1), buffer.align)
        if list(self.segments) != [kind for kind in KINDS if kind in stops] or len(self.segments) != len(self.plan["segments"]):
            self.say(f"the plan has segments {list(self.segments)}; its places need {sorted(stops)}")
        for kind, stop in stops.items():
            if not stop <= self.segments.get(kind, -1) < stop + widest[kind]:
                self.say(f"the {kind} segment has {self.segments.get(kind, 0):,} bytes and its places end at {stop:,}")
        return len(self.faults) == before

    def _apart(self) -> None:
        """Only reusable buffers share bytes."""
        for kind in KINDS:
            spans = sorted((p["offset"], p["offset"] + p["nbytes"], n) for n, p in self.places.items() if p["kind"] == kind)
            for low, high in pairwise(spans) if kind != "reusable" else ():
                if low[1] > high[0]:
                    self.say(f"{low[2]} and {high[2]} share {low[1] - high[0]:,} bytes of the {kind} segment")

    def _lives(self) -> dict[str, tuple[Life, ...]] | None:
        """Lives of the reusable buffers, after refusing races of any buffer and reads of bytes nobody wrote."""
        before = len(self.faults)
        touched: dict[str, dict[int, set[str]]] = {name: {} for name in self.buffers}
        for name in self.program["inputs"]:
            touched[name][-1] = {"write"}
        for i, step in enumerate(self.steps):
            for access, name in step.access:
                touched[name].setdefault(i, set()).add(access)
        for name in self.program["outputs"]:
            touched[name][len(self.steps)] = {"read"}
        lives = {}
        for name, found in touched.items():
            self._race(name, found)
            if self.buffers[name].kind == "reusable":
                if not found or found[min(found)] != {"write"}:
                    self.say(f"{name} is read before any step has written it, or never used")
                    continue
                lives[name] = _split(found)
                self._claim(name, lives[name][0].first, lives[name][-1].last)
            else:
                self._claim(name, -1, len(self.steps))
        return lives if len(self.faults) == before else None

    def _race(self, name: str, access: dict[int, set[str]]) -> None:
        latest: dict[str, int] = {}
        writers: dict[str, int] = {}
        for b, kinds in access.items():
            for a in (writers if kinds == {"read"} else latest).values():
                if not self.ordered(a, b):
                    self.say(f"steps {self._name(a)} and {self._name(b)} both touch {name}, one writes, and nothing orders them")
            queue = self.steps[b].queue if 0 <= b < len(self.steps) else ""
            latest[queue] = b
            if kinds != {"read"}:
                writers[queue] = b

    def _claim(self, name: str, first: int, last: int) -> None:
        place = self.places[name]
        wanted = (self._name(first), self._name(last), first + 1, last + 1)
        if (place.get("first"), place.get("last"), place.get("begin"), place.get("end")) != wanted:
            self.say(f"{name} lives from {wanted[0]} to {wanted[1]} (steps {wanted[2]} to {wanted[3]}); the plan says otherwise")

    def _handovers(self, lives: dict[str, tuple[Life, ...]]) -> None:
        """Whoever held a byte before is finished before the next holder's first write: by a certificate of the plan."""
        given: dict[tuple[str, str, int, int, str], list[list[str]]] = {}
        for item in self.given:
            chains = [[_text(n, "chain") for n in _list(chain, "chain")] for chain in _list(item["chains"], "chains")]
            born = chains[0][-1] if chains and chains[0] else ""
            names, span = (
                [_text(item[k], "hand-over") for k in ("early", "late")],
                [_count(item[k], "hand-over") for k in ("start", "stop")],
            )
            key = (names[0], names[1], span[0], span[1], born)
            if key in given:
                self.say(f"the hand-over from {key[0]} to {key[1]} at {born} is certified twice")
            given[key] = chains
        births = sorted((life.first, k, name, life) for k, name in enumerate(lives) for life in lives[name])
        held: list[tuple[int, int, str, Life]] = []
        for _, _, name, life in births:
            start, stop = self.places[name]["offset"], self.places[name]["offset"] + self.places[name]["nbytes"]
            under: dict[tuple[str, int], list[tuple[int, int, Life]]] = {}
            kept = []
            for a, b, holder, old in held:
                low, high = max(a, start), min(b, stop)
                if low >= high:
                    kept.append((a, b, holder, old))
                    continue
                if holder != name:
                    under.setdefault((holder, old.first), []).append((low, high, old))
                kept += [(x, y, holder, old) for x, y in ((a, low), (high, b)) if x < y]
            held = [*kept, (start, stop, name, life)]
            for (holder, _), spans in under.items():
                key = (holder, name, min(s[0] for s in spans), max(s[1] for s in spans), self._name(life.first))
                orders = given.pop(key, None)
                if orders is None:
                    self.say(f"{name} takes bytes [{key[2]:,}, {key[3]:,}) of {holder} at step {key[4]} without a certificate")
                self._follow((holder, spans[0][2]), (name, life), orders or [])
        for key in given:
            self.say(f"a certificate hands bytes from {key[0]} to {key[1]}, and the places do not")

    def _follow(self, early: tuple[str, Life], late: tuple[str, Life], chains: list[list[str]]) -> None:
        """One chain per queue, from the last use of the earlier life there to the first write of the later one."""
        (name, one), (other, two) = early, late
        pair = f"hand-over from {name} to {other}"
        if one.last >= two.first:
            self.say(
                f"{pair}: step {self._name(two.first)} writes {other} before {self._name(one.last)} uses {name} for the last time"
            )
            return
        last = {self.steps[a].queue: a for a in one.accesses if a >= 0}
        wanted = sorted(self.steps[a].name for a in last.values()) or ["start"]
        if sorted(chain[0] for chain in chains if chain) != wanted:
            self.say(
                f"{pair}: steps {wanted} use {name} last, and nothing orders all of them before step {self._name(two.first)}"
            )
            return
        for chain in chains:
            if chain[-1] != self._name(two.first):
                self.say(f"{pair}: a chain ends at {chain[-1]}, not at the first write of {other}")
            for a, b in pairwise(chain):
                self.links += 1
                if a == "start" and wanted == ["start"]:
                    continue
                i, j = self.at.get(a, -1), self.at.get(b, -1)
                if not 0 <= i < j or not (self.steps[i].queue == self.steps[j].queue or a in self.steps[j].after):
                    self.say(f"{pair}: nothing orders step {a} before step {b}")

    def _histories(self, lives: dict[str, tuple[Life, ...]]) -> None:
        """Histories that share bytes on several ranks: a step that all ranks reach lies between; reuse off keeps them apart."""
        names = self.program["histories"]
        fences = [i for i, step in enumerate(self.steps) if step.scope == "all"]
        for early, late in zip(names[::2], names[1::2], strict=False):
            a, b = self.places[early], self.places[late]
            shared = min(a["offset"] + a["nbytes"], b["offset"] + b["nbytes"]) - max(a["offset"], b["offset"])
            if shared <= 0 or early not in lives or late not in lives:
                continue
            if self.plan["reuse"] == "off":
                self.say(f"reuse is off, but {early} and {late} share {shared:,} bytes")
            for one, two in ((x, y) for x in lives[early] for y in lives[late]) if self.ranks > 1 else ():
                x, y = (one, two) if one.first < two.first else (two, one)
                if not any(all(self.ordered(p, k) for p in x.accesses) and self.ordered(k, y.first) for k in fences):
                    self.say(
                        f"step {self._name(y.first)} writes bytes that step {self._name(x.last)} uses on another of {self.ranks} "
                        f"ranks ({early} and {late} share {shared:,} bytes), and no step that all ranks reach lies between"
                    )

    def _bound(self) -> None:
        """The stated lower bound is the largest sum of bytes alive together in program order."""
        reusable = {name: b for name, b in self.buffers.items() if b.kind == "reusable"}
        unit = gcd(*(b.align for b in reusable.values())) or 1
        size = {name: -(-b.nbytes // unit) * unit for name, b in reusable.items()}
        needed = {name for name in self.program["outputs"] if name in size}
        bound = total = sum(size[name] for name in needed)
        for step in reversed(self.steps):
            mine = {name for _, name in step.access if name in size}
            total += sum(size[name] for name in mine - needed)
            needed |= mine
            bound = max(bound, total)
            fresh = {n for n in mine if all(kind == "write" for kind, name in step.access if name == n)}
            total -= sum(size[name] for name in fresh)
            needed -= fresh
        unread = {name for name in self.program["inputs"] if name in size} - needed
        bound = max(bound, total + sum(size[name] for name in unread))
        stated, peak = self.plan.get("lower_bound"), self.segments.get("reusable", 0)
        if stated != bound or bound > peak:
            self.say(f"the plan states a lower bound of {stated} bytes and a peak of {peak:,}; the steps give {bound:,}")

    def _name(self, position: int) -> str:
        return "start" if position < 0 else "end" if position >= len(self.steps) else self.steps[position].name


def _split(access: dict[int, set[str]]) -> tuple[Life, ...]:
    """A new life begins wherever a step only writes."""
    lives: list[list[int]] = []
    for position in sorted(access):
        if not lives or access[position] == {"write"}:
            lives.append([])
        lives[-1].append(position)
    return tuple(Life(tuple(found)) for found in lives)


def _step(item: Any) -> Step:
    tree = _object(item, "step", ("name", "queue", "scope", "after", "reads", "writes", "updates", "scratch"))
    name = _text(tree["name"], "step name")
    access = []
    for key, kind in (("reads", "read"), ("writes", "write"), ("updates", "update")):
        for pair in _list(tree[key], key):
            if not isinstance(pair, list) or len(pair) != 2:
                raise Refusal(f"step {name}: {key} must be pairs (role, buffer)")
            access.append((kind, _text(pair[1], "buffer name")))
    if _count(tree["scratch"], "scratch"):
        access.append(("write", f"{name}.scratch"))
    after = tuple(_text(n, "after") for n in _list(tree["after"], "after"))
    return Step(name, _text(tree["queue"], "queue"), _text(tree["scope"], "scope"), after, tuple(access))


def _buffers(program: dict[str, Any], steps: list[Step]) -> dict[str, Buffer]:
    """Declared buffers with sizes from their planes, then the scratch of each step."""
    found: dict[str, Buffer] = {}
    items = [_object(item, "buffer", ("name", "kind", "planes", "align")) for item in _list(program["buffers"], "buffers")]
    made = [
        Buffer(_text(b["name"], "buffer name"), _text(b["kind"], "kind"), _size(b), _count(b["align"], "align")) for b in items
    ]
    scratch = [(s["name"], s["scratch"]) for s in program["steps"] if s["scratch"]]
    made += [Buffer(f"{name}.scratch", "reusable", nbytes, SCRATCH_ALIGN) for name, nbytes in scratch]
    for buffer in made:
        if buffer.name in found:
            raise Refusal(f"buffer {buffer.name} is declared twice")
        if buffer.kind not in KINDS or buffer.align < 1 or buffer.nbytes < 1:
            raise Refusal(f"buffer {buffer.name} has kind {buffer.kind[:20]!r}, {buffer.nbytes} bytes, alignment {buffer.align}")
        found[buffer.name] = buffer
    return found


def _size(buffer: dict[str, Any]) -> int:
    planes = [_object(item, "plane", ("dtype", "shape")) for item in _list(buffer["planes"], "planes")]
    counts = [prod(_count(extent, "extent") for extent in _list(plane["shape"], "shape")) for plane in planes]
    return sum(n * ITEM_BYTES.get(_text(plane["dtype"], "dtype"), 0) for n, plane in zip(counts, planes, strict=True))


def _digest(tree: Any) -> str:
    """sha256 of the canonical text: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Refusal("an object names a field twice")
    return found


def _no_float(text: str) -> Any:
    raise Refusal(f"{text[:40]} is not a whole number")


def _object(value: Any, where: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{where} is a {type(value).__name__}; an object is wanted")
    missing = [name for name in wanted if name not in value]
    if missing:
        raise Refusal(f"{where} has no {', '.join(missing)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refusal(f"{where} is a {type(value).__name__}; a list is wanted")
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise Refusal(f"{where} is a {type(value).__name__}; a text is wanted")
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise Refusal(f"{where} is {str(value)[:40]}; a whole number between 0 and {LARGEST:,} is wanted")
    return value


if __name__ == "__main__":
    found = [verify_plan_file(name) for name in sys.argv[1:]]
    sys.stdout.writelines(f"{line}\n" for one in found for line in one.lines())
    sys.exit(0 if found and all(one.ok for one in found) else 1)
