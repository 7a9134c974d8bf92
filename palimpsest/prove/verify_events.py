"""Gate S7 once more, from ``events.jsonl`` and the record alone: the order of events, vector clocks, and what they prove.
Standard library only.

Written apart from the qualifier's own evaluation: here every event gets the set of the last events of each rank that happened
before it, by working through the ranks' lines until none can go on. A log that lacks a line, or that no execution can have
produced, is refused; an order that does not hold must be in a cell that did not pass.
"""

from collections import defaultdict, deque
from typing import Any

from palimpsest.core.errors import EvidenceError

_KINDS = {"begin": 3, "end": 3, "exchange": 5, "meet": 3, "signals": 4}
_FIELDS = {"case", "arrangement", "replay", "epoch", "rank", "events"}
_HISTORIES = {"index_history", "latent_history"}

Cells = dict[tuple[str, int, str], dict[str, Any]]


def check_events(lines: list[dict[str, Any]], record: dict[str, Any], cells: Cells) -> int:
    """Check every replay's log; returns how many events. Raises EvidenceError."""
    ranks = record["limits"]["ranks"]
    groups: dict[tuple[str, str, int], dict[int, list[Any]]] = defaultdict(dict)
    total = 0
    for number, line in enumerate(lines, 1):
        where = f"events.jsonl line {number}"
        _require(isinstance(line, dict) and set(line) == _FIELDS, f"{where} must have exactly the fields {sorted(_FIELDS)}")
        key = line["case"], line["arrangement"], line["replay"]
        _require(type(line["rank"]) is int and 0 <= line["rank"] < ranks, f"{where} names rank {line['rank']!r} of {ranks}")
        _require(line["rank"] not in groups[key], f"{where}: {key} of rank {line['rank']} is there twice")
        _check_shape(line["events"], ranks, where)
        groups[key][line["rank"]] = line["events"]
        total += len(line["events"])
    wanted = {(c["id"], name, i) for c in record["cases"] for name in ("base", "alias") for i in range(len(c["steps"]))}
    _require(set(groups) == wanted, f"events.jsonl lacks or adds replays: {sorted(wanted ^ set(groups))[:1]}")
    for key, logs in sorted(groups.items()):
        _require(len(logs) == ranks, f"events.jsonl has {len(logs)} of {ranks} ranks for {key}")
        for rank, fault in _faults([logs[r] for r in range(ranks)], record, key[1]):
            verdict = cells[key[0], rank, "S7"]["verdict"]
            _require(
                verdict != "PASS",
                f"events.jsonl: {key[0]} {key[1]} replay {key[2]}: {fault}, yet the S7 cell of rank {rank} passed",
            )
    return total


def _check_shape(events: Any, ranks: int, where: str) -> None:
    _require(isinstance(events, list) and bool(events), f"{where} holds no events")
    for event in events:
        good = isinstance(event, list) and event and event[0] in _KINDS and len(event) == _KINDS[event[0]]
        _require(bool(good) and all(isinstance(word, str) for word in event[:3]), f"{where}: {str(event)[:60]} is no event")
        for numbers in event[3:]:
            _require(
                isinstance(numbers, list) and all(type(n) is int for n in numbers), f"{where}: {str(event)[:60]} is no event"
            )
        if event[0] == "exchange":
            _require(
                all(0 <= n < ranks for n in event[3] + event[4]), f"{where}: {str(event)[:60]} names a rank that does not exist"
            )


def _faults(logs: list[list[Any]], record: dict[str, Any], arrangement: str) -> list[tuple[int, str]]:
    """(rank, what its order does not hold)."""
    known = _order(logs)
    touches = {step["name"]: set(step["reads"]) | set(step["writes"]) for step in record["schedule"]}
    meetings = [step["name"] for step in record["schedule"] if step["scope"] == "all"]
    found = []
    for early, late in pairs(record["plan"][arrangement]):
        everywhere = {early, late} == _HISTORIES
        for rank, log in enumerate(logs):
            starts = [i for i, e in enumerate(log) if e[0] == "begin" and late in touches.get(e[2], ())]
            for other in range(len(logs)) if everywhere else [rank]:
                ends = [i for i, e in enumerate(logs[other]) if e[0] == "end" and early in touches.get(e[2], ())]
                if starts and ends and known[rank][starts[0]][other] <= ends[-1]:
                    found.append((rank, f"{early} on rank {other} is not done before {late} on rank {rank} begins"))
    for rank, log in enumerate(logs):
        found += [(rank, f"step {name} did not join all ranks once") for name in meetings if not _joined(log, name)]
    return found


def _joined(log: list[Any], name: str) -> bool:
    """One meeting inside the step, and signals that went up by one."""
    inside, meets, readings = False, 0, []
    for event in log:
        if event[2] == name and event[0] in ("begin", "end"):
            inside = event[0] == "begin"
        elif event[0] == "meet":
            meets += inside
        elif event[0] == "signals" and event[2] == name:
            readings.append(event[3])
    return meets == 1 and len(readings) == 2 and [v + 1 for v in readings[0]] == readings[1]


def pairs(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """(early, late) of every pair that shares bytes, by the steps in which they live."""
    steps = {name: view["steps"] for name, view in plan["views"].items()}
    return [(a, b) if steps[a][1] < steps[b][0] else (b, a) for a, b in plan["shared"]]


def _order(logs: list[list[Any]]) -> list[list[list[int]]]:
    """Per rank and event: how many events of each rank happened before it or are it."""
    size = len(logs)
    now = [[0] * size for _ in logs]
    done: list[list[list[int]]] = [[] for _ in logs]
    mail: dict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
    posted: set[int] = set()
    while True:
        progress = False
        for rank, log in enumerate(logs):
            while len(done[rank]) < len(log) and log[len(done[rank])][0] != "meet":
                event = log[len(done[rank])]
                if event[0] == "exchange":
                    if rank not in posted:
                        for peer in event[3]:
                            mail[rank, peer].append(list(now[rank]))
                        posted.add(rank)
                        progress = True
                    if not all(mail[peer, rank] for peer in event[4]):
                        break
                    for peer in event[4]:
                        now[rank] = [max(a, b) for a, b in zip(now[rank], mail[peer, rank].popleft(), strict=True)]
                    posted.discard(rank)
                _finish(now, done, rank)
                progress = True
        left = [rank for rank in range(size) if len(done[rank]) < len(logs[rank])]
        if not left:
            return done
        if not progress:
            names = {logs[rank][len(done[rank])][2] for rank in left if logs[rank][len(done[rank])][0] == "meet"}
            waiting = all(logs[rank][len(done[rank])][0] == "meet" for rank in left)
            _require(
                len(left) == size and waiting and len(names) == 1,
                f"events.jsonl: rank {left[0]} waits for something that no rank did",
            )
            joint = [max(column) for column in zip(*now, strict=True)]
            for rank in left:
                now[rank] = list(joint)
                _finish(now, done, rank)


def _finish(now: list[list[int]], done: list[list[list[int]]], rank: int) -> None:
    now[rank][rank] = len(done[rank]) + 1
    done[rank].append(list(now[rank]))


def _require(good: bool, message: str) -> None:
    if not good:
        raise EvidenceError(message)
