"""Bring your own kernel: name it, load it, say which gates judge it.

A kernel is named ``OP=module:function`` and has one of two forms, told apart by its parameter names: the op's own contract,
``f(call, chunk)``, or for some ops a plain function of tensors (``foreign_form.py`` wraps it). Its code is imported only when
it is named, in this process and in every rank.

Nothing a foreign kernel says about itself is believed: its taps are cut off, and gates that need our own kernel's scores give
way to gates that need the persistent bytes only. ``RULES`` is that exchange, op by op; ``verify_table.py`` holds it a second
time.
"""

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadConfig, UnknownName
from palimpsest.kernels.table import OPS
from palimpsest.prove.bounds import PORTABLE_1, U32, U_BF16, Arithmetic
from palimpsest.prove.gates import GATES

CONTRACT_FORM = ("call", "chunk")


@dataclass(frozen=True)
class Rule:
    """How a foreign implementation of an op is judged.

    plain:   parameter names of its plain form, () when only the contract form exists
    without: gates that need something only our own kernel shows; extra: gates that stand in their place
    """

    plain: tuple[str, ...]
    without: tuple[str, ...]
    extra: tuple[str, ...]
    because: str


_BYTES = Rule((), (), ("B1",), "what it writes must be the engine's bytes on the same operands")
RULES: dict[str, Rule] = {
    "index_select": Rule(
        ("keys", "scales", "query", "weights", "visible", "topk"),
        ("K2", "K3", "K5"),
        ("K7",),
        "its scores are unknown: every row's set is judged by exact scores of the persistent bytes",
    ),
    "sparse_attend": Rule(
        ("query", "records", "ids", "counts", "scale"),
        ("O3", "O5"),
        (),
        "its order and rounding are unknown: the output must lie in the bound of the arithmetic foreign-32",
    ),
} | {op: _BYTES for op in OPS if op not in ("index_select", "sparse_attend", "barrier")}

#: gates that exist for foreign kernels only
FOREIGN_GATES = frozenset(gate for rule in RULES.values() for gate in rule.extra)

#: what a foreign attention must keep: fp32 dots and sums in any order, every probability within one bf16 rounding
#: (exponential and rescaling included), one fp32 division after the sum, an fp32 result
FOREIGN_32 = Arithmetic(
    name="foreign-32",
    index_dot_u=PORTABLE_1.index_dot_u,
    head_u=PORTABLE_1.head_u,
    score_u=PORTABLE_1.score_u,
    logit_dot_u=U32,
    logit_u=2 * U32,
    sub_u=2 * U32,
    exp_eps=0.0,
    p_u=U_BF16,
    sum_u=U32,
    block=0,
    online=False,
    sum_rounded_p=True,
    div_u=2 * U32,
    out_u=0.0,
    provenance="the contract of docs/own-kernel.md, in unit roundoffs of fp32 and bf16",
)

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Foreign:
    """One loaded kernel. form: ``contract`` or ``plain``; file, sha256: of the module it came from ("" when it has none)."""

    op: str
    name: str
    form: str
    file: str
    sha256: str
    function: Callable[..., Any]

    def facts(self, steps: Iterable[str]) -> dict[str, Any]:
        """For record.json: what ran, and which gates judged it."""
        rule = RULES[self.op]
        kept = (
            "" if self.form == "contract" else "; A3 does not look into its step, because a function of tensors returns new ones"
        )
        return {
            "op": self.op,
            "name": self.name,
            "form": self.form,
            "file": self.file,
            "sha256": self.sha256,
            "steps": list(steps),
            "gates_without": list(rule.without),
            "gates_extra": list(rule.extra),
            "because": rule.because + kept,
        }


def parse(words: Iterable[str]) -> dict[str, str]:
    """``OP=module:function`` words as op -> name. Raises UnknownName and BadConfig; imports nothing."""
    found: dict[str, str] = {}
    for word in words:
        op, equals, name = word.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise BadConfig(f"--kernel {word!r}: OP=module:function is wanted, like index_select=mypackage.mymodule:select")
        if op == "barrier":
            raise BadConfig(
                "--kernel barrier: the meeting of the ranks writes no bytes a gate could judge, so it cannot be qualified"
            )
        if op not in RULES:
            raise UnknownName("op", op, list(RULES))
        if op in found:
            raise BadConfig(f"--kernel {op} is given twice: {found[op]} and {name}")
        found[op] = name
    return found


def load_all(kernels: Mapping[str, str]) -> dict[str, Foreign]:
    """Op -> loaded kernel. Imports foreign code. Raises BadConfig."""
    return {op: load(op, name) for op, name in kernels.items()}


def load(op: str, name: str) -> Foreign:
    """Import one kernel and tell its form. Raises BadConfig for what cannot be imported, is no function, or has another
    signature.
    """
    module_name, _, attribute = name.partition(":")
    where = f"--kernel {op}={name}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # boundary: foreign code may raise anything while it is imported
        text = (str(error).splitlines() or [""])[0]
        raise BadConfig(
            f"{where}: importing {module_name} failed with {type(error).__name__}: {text}; run from the folder that holds it"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise BadConfig(f"{where}: {module_name} has no function {attribute}")
    path = getattr(module, "__file__", None)
    file = Path(path) if path else None
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else ""
    return Foreign(op, name, _form(op, function, where), file.name if file else "", digest, function)


def _form(op: str, function: Callable[..., Any], where: str) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise BadConfig(f"{where}: its parameters cannot be read; wrap it in a Python function") from None
    needed = tuple(
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
    plain = RULES[op].plain
    if needed == CONTRACT_FORM:
        return "contract"
    if plain and needed == plain:
        return "plain"
    also = f" or ({', '.join(plain)})" if plain else ""
    raise BadConfig(f"{where}: takes ({', '.join(needed)}); (call, chunk){also} is wanted, see docs/own-kernel.md")


def search_here(folder: str) -> None:
    """Let modules of ``folder`` be imported, after everything installed, here and in ranks started from here."""
    if folder not in sys.path:
        sys.path.append(folder)


def gates_of(ops: Iterable[str]) -> list[str]:
    """The gates that judge a run whose ``ops`` are foreign, in the order of the registry."""
    rules = [RULES[op] for op in ops]
    without, extra = {g for r in rules for g in r.without}, {g for r in rules for g in r.extra}
    return [gate for gate in GATES if gate not in without and (gate not in FOREIGN_GATES or gate in extra)]


def claim(kernels: Mapping[str, str]) -> str:
    """What the claim of a record adds for foreign kernels; empty without any."""
    if not kernels:
        return ""
    named = ", ".join(f"{op} was {name}" for op, name in sorted(kernels.items()))
    return f" Foreign kernels ran in both arrangements: {named}."
