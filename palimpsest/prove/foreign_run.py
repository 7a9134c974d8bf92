"""What a rank does differently when some kernels are foreign: what it binds, who judges the selection, which cells it expects.

Without foreign kernels everything here is the identity.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from palimpsest.core.canon import canonical
from palimpsest.kernels.call import Implementation
from palimpsest.prove.capture import Observation
from palimpsest.prove.cases import Case, rank_rows
from palimpsest.prove.certified import CertifiedJudge
from palimpsest.prove.expect import ARRANGEMENTS
from palimpsest.prove.foreign import RULES, load_all
from palimpsest.prove.foreign_form import implementation
from palimpsest.prove.gates import Sheet
from palimpsest.prove.gates_select import Judge
from palimpsest.prove.rank_setup import Setup
from palimpsest.run.bind import default_implementations


class ForeignRun:
    """The foreign kernels of a run on this rank. Loads them: raises BadConfig."""

    def __init__(self, setup: Setup):
        self.setup, self.kernels = setup, load_all(setup.job.kernels)
        self.without = {gate for op in self.kernels for gate in RULES[op].without}
        #: steps whose op must write the engine's bytes
        self.compared = frozenset(s.name for s in setup.program.steps if s.op in self.kernels and "B1" in RULES[s.op].extra)
        plain = frozenset(s.name for s in setup.program.steps if s.op in self.kernels and self.kernels[s.op].form == "plain")
        #: steps in which memory is taken on purpose: by a function of tensors, or by the comparison
        self.allocating = plain | self.compared

    @property
    def judge(self) -> type[Judge]:
        """Who judges the selection."""
        return CertifiedJudge if self.selects else Judge

    @property
    def selects(self) -> bool:
        """Whether the selector is foreign: its scores are not seen, and it may break ties as it likes."""
        return "index_select" in self.kernels

    def selected(self, judge: Judge) -> Callable[[], None] | None:
        """What to call when the selection step is over."""
        return judge.selected if isinstance(judge, CertifiedJudge) else None

    def bound(self) -> dict[str, Implementation] | None:
        """Op -> implementation with the foreign ones in place, or None when there is none."""
        if not self.kernels:
            return None
        known = default_implementations(self.setup.program, self.setup.job.engine)
        return known | {op: implementation(kernel, known[op]) for op, kernel in self.kernels.items()}

    def expect(self, sheet: Sheet, case: Case, rank: int) -> None:
        """Take the cells away that need our own kernels, and add those that stand in their place."""
        for gate in self.without:
            sheet.cells.pop(gate, None)
        both = len(ARRANGEMENTS)
        if self.selects:
            sheet.expect("K7", both * sum(rank_rows(self.setup.profile, step.rows)[rank] for step in case.steps))
        sheet.expect("B1", both * len(case.steps) * len(self.compared))

    def twins(self, sheet: Sheet, o: Observation, where: str) -> None:
        """B1 of one replay."""
        for said, nbytes in o.twins:
            sheet.cell("B1").check(not said, 1, f"{where}: {said}", nbytes)

    def keep(self, certificates: list[dict[str, Any]], folder: Path, rank: int) -> list[dict[str, Any]]:
        """Certificates to report. A foreign selector's can be many: they go to a file of the run's private folder instead."""
        if not self.selects:
            return certificates
        with spilled(folder, rank).open("w") as target:
            target.writelines(canonical(line) + "\n" for line in certificates)
        return []


def spilled(folder: Path, rank: int) -> Path:
    """Where a rank leaves its certificates."""
    return folder / f"ties-{rank}.jsonl"
