"""Every op: four files, one table row, and the portable engine against the reference on the op's hostile cases."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from bare_ranks import aligned, make_call, on_ranks

import palimpsest.kernels
from palimpsest.core.errors import UnknownName
from palimpsest.kernels import table
from palimpsest.kernels.hostile import Case, Planes

FOLDERS = sorted(p.parent.name for p in Path(palimpsest.kernels.__file__).parent.glob("*/__init__.py"))
CASES = [(op, case) for op in FOLDERS for case in import_module(f"palimpsest.kernels.{op}.cases").cases()]


@pytest.mark.parametrize("op", FOLDERS)
def test_an_op_is_four_files_and_a_contract_of_its_name(op):
    folder = Path(palimpsest.kernels.__file__).parent / op
    assert {f.name for f in folder.glob("*.py")} >= {"__init__.py", "contract.py", "reference.py", "cpu.py", "cases.py"}
    assert table.contract(op).name == op


def test_the_table_lists_exactly_the_folders():
    assert sorted(table.OPS) == FOLDERS
    assert len(FOLDERS) == 13


def test_unknown_names_are_named():
    for find in (lambda: table.contract("sort"), lambda: table.implementation("sort", "portable")):
        with pytest.raises(UnknownName, match=r"unknown op 'sort'.*index_select"):
            find()
    with pytest.raises(UnknownName, match=r"unknown engine 'cuda'; known: .*portable, reference"):
        table.implementation("barrier", "cuda")


def test_every_op_has_cases_with_no_rows():
    empty = {op for op, case in CASES if case.chunk.rows == 0}
    assert empty == set(FOLDERS)


def copied(planes: Planes) -> Planes:
    """Aligned copies, as planned buffers are."""
    found = {}
    for role, tensors in planes.items():
        found[role] = {}
        for name, tensor in tensors.items():
            raw = aligned(tensor.numel() * tensor.element_size())
            found[role][name] = raw.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return found


def play(op: str, case: Case, engine: str, scratch_fill: int = 0x7F) -> list[Planes]:
    """Run the case on all ranks; the planes afterwards."""
    run = table.implementation(op, engine)

    def body(comm):
        planes = copied(case.planes[comm.rank])
        run(make_call(op, case.params, planes, comm, scratch_fill=scratch_fill), case.chunk)
        return planes

    return on_ranks(case.ranks, body)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def compare(op: str, case: Case, found: list[Planes], expected: list[Planes]) -> None:
    for rank in range(case.ranks):
        bounds = case.bound(case.planes[rank]) if case.bound else {}
        for operand in table.contract(op).operands:
            if operand.role not in case.planes[rank] or operand.role == "staging":
                continue
            for name, value in found[rank][operand.role].items():
                where = f"{op}, {case.name}, rank {rank}: {operand.role}.{name}"
                twin, before = expected[rank][operand.role][name], case.planes[rank][operand.role][name]
                if operand.access == "read":
                    assert same_bytes(value, before), f"{where} is read-only but changed"
                elif operand.role in bounds:
                    within(value, twin, bounds[operand.role], case.chunk.rows, where)
                    assert same_bytes(value[case.chunk.rows :], before[case.chunk.rows :]), (
                        f"{where} changed past the active rows"
                    )
                else:
                    assert same_bytes(value, twin), f"{where} differs at {differs(value, twin)}"


def within(value, twin, bound, rows, where):
    value, twin, bound = (t[:rows].double() for t in (value, twin, bound))
    assert torch.equal(value.isnan(), twin.isnan()), where
    worst = ((value - twin).abs() - bound).nan_to_num(0.0)
    assert not (worst > 0).any(), f"{where} is off by {worst.max()} more than its bound"


def differs(value, twin):
    wrong = (
        (value != twin).nonzero()
        if value.dtype != torch.float8_e4m3fn
        else (value.view(torch.uint8) != twin.view(torch.uint8)).nonzero()
    )
    return f"{wrong[:4].tolist()} ({len(wrong)} places)"


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}: {case.name}" for op, case in CASES])
def test_portable_agrees_with_the_reference(op, case):
    compare(op, case, play(op, case, "portable"), play(op, case, "reference"))


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}: {case.name}" for op, case in CASES])
def test_stale_scratch_never_shows(op, case):
    first = play(op, case, "portable", scratch_fill=0x00)
    for fill in (0x7F, 0xFF):
        for before, after in zip(first, play(op, case, "portable", scratch_fill=fill), strict=True):
            for role, planes in before.items():
                for name, tensor in planes.items():
                    assert same_bytes(tensor, after[role][name]), f"{role}.{name} depends on stale scratch {fill:#x}"
