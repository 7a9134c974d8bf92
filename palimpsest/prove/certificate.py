"""The checker of tie certificates: Python integers and the standard library, and nothing else of the project.

A certificate says: these two selected sets differ, and each id in which they differ is a proved tie at the cutoff. The checker
believes none of it. It reads the records again, computes every score from bits, and derives each class itself. Its decoders share
no code with ``exact.py``.
"""

import hashlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

SCHEMA = "qualify.tie/v1"

#: token id -> the bytes of its index record: values, then (fp8) the fp32 scale, little-endian
ReadRecord = Callable[[int], bytes]

_FIELDS: dict[str, type] = {
    **dict.fromkeys(("row", "rank", "topk", "visible", "heads", "dim", "above", "equal", "needed"), int),
    **dict.fromkeys(("schema", "format", "query", "weights"), str),
    **dict.fromkeys(("rounding", "kth"), dict),
    **dict.fromkeys(("only_base", "only_alias", "members"), list),
}
_MEMBER: dict[str, type] = {"id": int, "mantissa": int, "exponent": int, "sha256": str, "bits": str, "class": str}
_ROUNDING = {"head": int, "score": int, "dot": int}
#: bounds of what a stranger's certificate makes the checker compute: heads, dims and powers of two; and unit roundoffs
_MOST, _MOST_ROUNDING = 4096, 256
#: the exponent of fp64's unit roundoff
_FP64 = -53


def _float_units(bits: int) -> int:
    """fp32 ``bits`` as a whole number of 2**-149. Raises ValueError for infinities and NaN."""
    sign, exponent, fraction = bits >> 31, bits >> 23 & 255, bits & 0x7FFFFF
    if exponent == 255:
        raise ValueError(f"fp32 bits {bits:08x} are not finite")
    units = fraction if exponent == 0 else (fraction | 0x800000) << (exponent - 1)
    return -units if sign else units


def _byte_units(code: int) -> int:
    """An e4m3 code as a whole number of 2**-9. Raises ValueError for NaN."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    if code & 127 == 127:
        raise ValueError(f"e4m3 code {code:02x} is NaN")
    units = fraction if exponent == 0 else (fraction + 8) * 2 ** (exponent - 1)
    return -units if sign else units


def float_bits(bits: int) -> Fraction:
    """The number of fp32 ``bits``. Raises ValueError for infinities and NaN."""
    return Fraction(_float_units(bits), 1 << 149)


def byte_value(code: int) -> Fraction:
    """The number of an e4m3 code. Raises ValueError for NaN."""
    return Fraction(_byte_units(code), 1 << 9)


def _words(raw: bytes) -> list[int]:
    return [_float_units(int.from_bytes(raw[i : i + 4], "little")) for i in range(0, len(raw), 4)]


def _vector(raw: bytes, format: str) -> list[int]:
    """Stored values as whole numbers of 2**-9 (fp8) or 2**-149 (fp32)."""
    return [_byte_units(c) for c in raw] if format == "fp8" else _words(raw)


class _Row:
    """The query side of a certificate, decoded."""

    def __init__(self, cert: dict[str, Any]):
        self.format, self.heads, self.dim = cert["format"], cert["heads"], cert["dim"]
        element = 1 if self.format == "fp8" else 4
        query, weights = bytes.fromhex(cert["query"]), bytes.fromhex(cert["weights"])
        if len(query) != self.heads * self.dim * element or len(weights) != 4 * self.heads:
            raise ValueError(
                f"query of {len(query)} and weights of {len(weights)} bytes do not hold {self.heads} heads of {self.dim}"
            )
        values = _vector(query, self.format)
        self.query = [values[h * self.dim : (h + 1) * self.dim] for h in range(self.heads)]
        self.weights = _words(weights)
        self.unit = 2 * (9 if self.format == "fp8" else 149) + 149
        self.record_bytes = self.dim * element + (4 if self.format == "fp8" else 0)
        self.rounding = cert["rounding"]

    def score(self, record: bytes) -> tuple[Fraction, Fraction, Fraction]:
        """(s*, mass, spread) of a record: the score, scale sum |w| relu(D), scale sum |w| sum |q k|."""
        if len(record) != self.record_bytes:
            raise ValueError(f"an index record has {len(record)} bytes, {self.record_bytes} expected")
        body = self.dim if self.format == "fp8" else 4 * self.dim
        key = _vector(record[:body], self.format)
        scale = Fraction(_words(record[body:])[0], 1 << 149) if self.format == "fp8" else Fraction(1)
        score = mass = spread = 0
        for weight, query in zip(self.weights, self.query, strict=True):
            terms = [a * b for a, b in zip(query, key, strict=True)]
            hit = max(0, sum(terms))
            score += weight * hit
            mass += abs(weight) * hit
            spread += abs(weight) * sum(map(abs, terms))
        unit = scale / (1 << self.unit)
        return score * unit, mass * abs(unit), spread * abs(unit)

    def error(self, score: Fraction, mass: Fraction, spread: Fraction) -> Fraction:
        """How far a deployed score may lie from s*, by the rounding exponents of the certificate (bounds.py derives the
        formula)."""
        head, stored = Fraction(2) ** self.rounding["head"], Fraction(2) ** self.rounding["score"]
        # dots of e4m3 records are exact in fp64, and only there
        exact = self.format == "fp8" and self.rounding["dot"] <= _FP64
        drift = Fraction(0) if exact else ((1 + Fraction(2) ** self.rounding["dot"]) ** self.dim - 1) * spread
        inner = drift + ((1 + head) ** (self.heads + 1) - 1) * (mass + drift)
        return inner + stored * (abs(score) + inner) + Fraction(1, 1 << 150)


def _shape_faults(cert: Any) -> list[str]:
    if not isinstance(cert, dict) or set(cert) != set(_FIELDS):
        return [f"fields are {sorted(cert) if isinstance(cert, dict) else type(cert).__name__}, expected {sorted(_FIELDS)}"]
    faults = [f"{k} is not {t.__name__}" for k, t in _FIELDS.items() if type(cert[k]) is not t]
    if faults:
        return faults
    entries = [cert["kth"], *cert["members"]]
    if any(
        not isinstance(e, dict) or set(e) != set(_MEMBER) or any(type(e[k]) is not t for k, t in _MEMBER.items()) for e in entries
    ):
        faults.append(f"kth and members must have exactly {sorted(_MEMBER)}")
    if set(cert["rounding"]) != set(_ROUNDING) or any(type(v) is not int or v >= 0 for v in cert["rounding"].values()):
        faults.append("rounding must hold the negative exponents dot, head and score")
    if any(type(i) is not int for i in cert["only_base"] + cert["only_alias"]):
        faults.append("only_base and only_alias must hold ids")
    if cert["schema"] != SCHEMA:
        faults.append(f"schema is {cert['schema']!r}, expected {SCHEMA!r}")
    if cert["format"] not in ("fp8", "fp32") or not 1 <= cert["heads"] <= _MOST or not 1 <= cert["dim"] <= _MOST:
        faults.append(f"format must be fp8 or fp32, heads and dim between 1 and {_MOST}")
    return faults or _power_faults(cert)


def _power_faults(cert: dict[str, Any]) -> list[str]:
    """Exponents that no score of finite fp32 factors has: 2 to their power would fill the memory before it is compared."""
    if any(value < -_MOST_ROUNDING for value in cert["rounding"].values()):
        return [f"a rounding exponent lies below -{_MOST_ROUNDING}"]
    if any(abs(entry["exponent"]) > _MOST for entry in (cert["kth"], *cert["members"])):
        return [f"a score's exponent lies beyond +-{_MOST}"]
    return []


def _count_faults(cert: dict[str, Any]) -> list[str]:
    faults = []
    base, alias, n = cert["only_base"], cert["only_alias"], cert["visible"]
    m = min(cert["topk"], n)
    if not base or len(base) != len(alias):
        faults.append(
            f"{len(base)} ids only in base, {len(alias)} only in alias: valid sets differ by equally many, at least one"
        )
    if sorted(base + alias) != [e["id"] for e in cert["members"]] or len(set(base + alias)) != len(base + alias):
        faults.append("members must list each differing id once, ascending")
    if any(not 0 <= i < n for i in [*base, *alias, cert["kth"]["id"]]):
        faults.append(f"an id lies outside the {n} visible tokens")
    if cert["needed"] != m - cert["above"] or not 0 < cert["needed"] <= cert["equal"] or cert["above"] < 0:
        faults.append(f"needed {cert['needed']} of {cert['equal']} equal with {cert['above']} above does not fill {m} slots")
    if cert["above"] + cert["equal"] > n:
        faults.append(f"{cert['above']} above and {cert['equal']} equal exceed the {n} visible tokens")
    return faults


def _entry_faults(entry: dict[str, Any], row: _Row, record: bytes, tau: Fraction, kth_bits: str) -> list[str]:
    """Faults of one entry: digest, score, and the class that follows from them."""
    where = f"id {entry['id']}"
    faults = []
    if hashlib.sha256(record).hexdigest() != entry["sha256"]:
        faults.append(f"{where}: record digest differs from the stored record")
    score, mass, spread = row.score(record)
    if Fraction(entry["mantissa"]) * Fraction(2) ** entry["exponent"] != score:
        faults.append(f"{where}: score differs from the one its bytes give")
    if score == tau:
        kind = "exact_tie"
    elif entry["bits"] and entry["bits"] == kth_bits:
        off = abs(float_bits(int(entry["bits"], 16)) - score)
        kind = "rounded_tie" if off <= row.error(score, mass, spread) else "other"
    else:
        kind = "other"
    if entry["class"] != kind:
        faults.append(f"{where}: class {entry['class']!r} claimed, {kind!r} found")
    if kind == "other":
        faults.append(f"{where}: not a tie")
    return faults


def check_certificate(
    cert: Any, read_record: ReadRecord, *, whole: bool = False, rounding: dict[str, int] | None = None
) -> list[str]:
    """Everything wrong with a certificate; an empty list when it proves its claim.

    whole: also score all visible records, and so check the cutoff and the class sizes (0.2 ms and more per record). Without it
        the k-th entry witnesses that the cutoff value is a real score, but not its rank.
    rounding: the engine's own exponents of unit roundoffs (dot, head, score); a certificate that claims others is at fault. The
        deployed bits of a rounded tie are a claim no record can confirm; an exact tie needs none.
    """
    faults = _shape_faults(cert) or _count_faults(cert)
    if not faults and rounding not in (None, cert["rounding"]):
        faults.append(f"rounding {cert['rounding']} is claimed, the engine's is {rounding}")
    if faults:
        return faults
    try:
        row = _Row(cert)
        kth = cert["kth"]
        tau = row.score(read_record(kth["id"]))[0]
        for entry in [kth, *cert["members"]]:
            faults += _entry_faults(entry, row, read_record(entry["id"]), tau, kth["bits"])
        if whole and not faults:
            faults += _whole_faults(cert, row, read_record, tau)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        faults.append(str(error))
    return faults


def _whole_faults(cert: dict[str, Any], row: _Row, read_record: ReadRecord, tau: Fraction) -> list[str]:
    scores = [row.score(read_record(i))[0] for i in range(cert["visible"])]
    above, equal = sum(s > tau for s in scores), sum(s == tau for s in scores)
    if (above, equal) != (cert["above"], cert["equal"]):
        return [
            f"{above} scores lie above the cutoff and {equal} on it; the certificate says {cert['above']} and {cert['equal']}"
        ]
    return []
