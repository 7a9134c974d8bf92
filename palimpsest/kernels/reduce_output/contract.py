"""All-reduce of the partial outputs: each rank sums its row slice as a binary tree over ranks, then slices are all-gathered."""

from palimpsest.core.contract import OpContract, Operand

CONTRACT = OpContract(
    name="reduce_output",
    summary="output = tree-sum over ranks of partial, rounded once to the activation dtype",
    operands=(
        Operand("partial", "read", "[rows,hidden] fp32"),
        Operand("staging", "update", "[staging bytes] u8"),
        Operand("output", "write", "[rows,hidden] bf16|fp32"),
    ),
    params=("hidden", "ranks"),
    scratch=lambda hidden, ranks: 0,
    exact="every byte: the addition tree is fixed and the same on every rank",
    collective=True,
)
