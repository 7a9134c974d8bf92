"""What a record's layout tables say on their own: containment, alignment, which buffers share bytes, and the exact saving.

Integers only, from ``record.json`` alone. A record whose tables do not support its storage gates is refused.
"""

from typing import Any

from palimpsest.core.errors import EvidenceError

_INDEX, _LATENT = "index_history", "latent_history"


def check_layout(record: dict[str, Any]) -> None:
    """Re-derive S1, S2, S3 and A1 from the recorded views of both arrangements. Raises EvidenceError."""
    plans = record["plan"]
    for name in ("base", "alias"):
        _check_views(plans[name], name)
    together = _shared(plans["alias"]["views"])
    _require((_INDEX, _LATENT) in together, "plan.alias: index_history and latent_history do not share bytes, nothing is saved")
    _require((_INDEX, _LATENT) not in _shared(plans["base"]["views"]), "plan.base: index_history and latent_history share bytes")
    _check_histories(plans["alias"]["views"])
    _check_same_but_index(plans["base"]["views"], plans["alias"]["views"])
    saving = plans["base"]["logical"] - plans["alias"]["logical"]
    each = record["facts"].get("index_record_bytes")
    _require(type(each) is int, f"facts.index_record_bytes is {each!r}, a whole number is wanted")
    wanted = each * record["limits"]["tokens"]
    _require(saving == wanted, f"base minus alias is {saving} bytes, the index history has {wanted}")


def _check_views(plan: dict[str, Any], name: str) -> None:
    segments = plan["segments"]
    for view, place in plan["views"].items():
        where = f"plan.{name}: {view}"
        _require(place["segment"] in segments, f"{where} lies in segment {place['segment']!r}, which is not listed")
        end, size = place["offset"] + place["bytes"], segments[place["segment"]]
        _require(end <= size, f"{where} ends at {end}, its segment has {size} bytes")
        _require(
            place["align"] > 0 and place["offset"] % place["align"] == 0,
            f"{where} starts at {place['offset']}, aligned to {place['align']}",
        )
    _require(
        sum(segments.values()) == plan["logical"],
        f"plan.{name}: segments sum to {sum(segments.values())}, logical is {plan['logical']}",
    )
    found = {tuple(sorted(pair)) for pair in _shared(plan["views"])}
    named = {tuple(sorted(pair)) for pair in plan["shared"]}
    _require(found == named, f"plan.{name}: pairs sharing bytes differ from those listed: {sorted(found ^ named)[:1]}")
    for first, second in found:
        a, b = plan["views"][first], plan["views"][second]
        _require(a["segment"] == "reusable", f"plan.{name}: {first} and {second} share bytes in segment {a['segment']}")
        apart = a["steps"][1] < b["steps"][0] or b["steps"][1] < a["steps"][0]
        _require(apart, f"plan.{name}: {first} {a['steps']} and {second} {b['steps']} share bytes while both are alive")


def _shared(views: dict[str, Any]) -> set[tuple[str, str]]:
    """Pairs of views (in name order) that share at least one byte, by a sweep over offsets."""
    found = set()
    order = sorted((v["segment"], v["offset"], v["offset"] + v["bytes"], name) for name, v in views.items() if v["bytes"])
    for at, (segment, _, stop, name) in enumerate(order):
        for other_segment, start, _, other in order[at + 1 :]:
            if other_segment != segment or start >= stop:
                break
            found.add((min(name, other), max(name, other)))
    return found


def _check_histories(views: dict[str, Any]) -> None:
    index, latent = views[_INDEX], views[_LATENT]
    start, stop = index["offset"], index["offset"] + index["bytes"]
    _require(
        start == latent["offset"] and stop <= latent["offset"] + latent["bytes"],
        f"plan.alias: index_history [{start}, {stop}) is not the head of latent_history, which starts at {latent['offset']}",
    )


def _check_same_but_index(base: dict[str, Any], alias: dict[str, Any]) -> None:
    _require(set(base) == set(alias), f"the arrangements hold different buffers: {sorted(set(base) ^ set(alias))[:1]}")
    for name in sorted(set(base) - {_INDEX}):
        _require(
            base[name] == alias[name], f"{name} lies at {base[name]['offset']} in base and at {alias[name]['offset']} in alias"
        )


def _require(good: bool, message: str) -> None:
    if not good:
        raise EvidenceError(message)
