"""OpContract: what an op promises, apart from every implementation of it.

A contract names the operands with their axes and dtypes, the parameters, the scratch (a function of sizes, so that planning and
running read the same number), and what is exact. ``kernels/<op>/contract.py`` holds one; it imports the standard library and
``core`` only.
"""

from collections.abc import Callable
from dataclasses import dataclass

from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import Step


@dataclass(frozen=True)
class Operand:
    """One role of an op.

    access: ``read``, ``write`` (every byte of the active region is overwritten) or ``update`` (reads and writes)
    layout: the planes and axes in words a reader can check, e.g. ``"keys [tokens,128] e4m3; scales [tokens] fp32"``
    """

    role: str
    access: str
    layout: str
    optional: bool = False


@dataclass(frozen=True)
class OpContract:
    """The promise of one op.

    params:     names the op reads, in the order of the docs
    scratch:    (params) -> bytes of scratch at most, at any legal shape
    collective: every rank must call it in the same order (it uses ``Comm``)
    exact:      what two correct implementations must agree on, in words
    """

    name: str
    summary: str
    operands: tuple[Operand, ...]
    params: tuple[str, ...]
    scratch: Callable[..., int]
    exact: str
    collective: bool = False

    def step(
        self,
        name: str,
        phase: str,
        operands: dict[str, str],
        /,
        scope: str = "rank",
        queue: str = "main",
        after: tuple[str, ...] = (),
        **params: int | str | float | bool,
    ) -> Step:
        """A Step that uses this contract, with every required role and parameter given and no other. Raises BadConfig."""
        roles = {o.role: o for o in self.operands}
        missing = [o.role for o in self.operands if not o.optional and o.role not in operands]
        extra = [r for r in operands if r not in roles]
        if missing or extra:
            raise BadConfig(f"step {name} ({self.name}): roles missing {missing}, unknown {extra}; it takes {sorted(roles)}")
        if set(params) != set(self.params):
            raise BadConfig(f"step {name} ({self.name}): parameters {sorted(params)} given, {sorted(self.params)} wanted")
        pick = {
            access: tuple((o.role, operands[o.role]) for o in self.operands if o.access == access and o.role in operands)
            for access in ("read", "write", "update")
        }
        return Step(
            name=name,
            op=self.name,
            phase=phase,
            reads=pick["read"],
            writes=pick["write"],
            updates=pick["update"],
            scratch=self.scratch(**params),
            params=tuple(sorted(params.items())),
            scope=scope,
            queue=queue,
            after=after,
        )
