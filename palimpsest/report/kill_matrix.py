"""The kill matrix of the self-test as a table: one row a mutant, and which gates noticed it."""

from collections.abc import Mapping
from typing import Any


def show(matrix: Mapping[str, Any]) -> None:
    """Print the mutants, then what each gate is needed for."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("mutant", "form", "what is wrong", "designated", "killed by", "", title="kill matrix", title_justify="left")
    for row in matrix["mutants"]:
        well = "" if not row["missing"] else "not passed" if row["control"] else "SURVIVES"
        form = "control" if row["control"] else row["form"]
        table.add_row(row["id"], form, row["title"], " ".join(row["designated"]), " ".join(row["killed_by"]) or "-", well)
    console.print(table)
    gates = Table("gate", "needed for", title="first gate to notice", title_justify="left")
    for gate, mutant in matrix["gates"].items():
        gates.add_row(gate, mutant or "DEAD: kills nothing that no gate before it kills")
    console.print(gates)


def markdown(matrix: Mapping[str, Any]) -> str:
    """The same for a page of documentation."""
    lines = ["| mutant | form | what is wrong | injected at | designated | killed by |", "|---|---|---|---|---|---|"]
    for row in matrix["mutants"]:
        form = "control" if row["control"] else row["form"]
        cells = [row["id"], form, row["title"], row["point"], " ".join(row["designated"]), " ".join(row["killed_by"])]
        lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    lines += ["", "| gate | needed for |", "|---|---|"]
    lines += [f"| {gate} | {mutant or 'nothing: dead'} |" for gate, mutant in matrix["gates"].items()]
    return "\n".join(lines) + "\n"
