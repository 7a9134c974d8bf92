"""All-gather the selected ids: afterwards every rank has the ids of all rows."""

from palimpsest.core.contract import OpContract, Operand

CONTRACT = OpContract(
    name="exchange_ids",
    summary="ids[rows,topk] = slices of all ranks in rank order; rows at or past the active count become -1 with count 0",
    operands=(
        Operand("local_ids", "read", "[slice,topk] i32"),
        Operand("local_counts", "read", "counts [slice] i32; nans [slice] i32"),
        Operand("ids", "write", "[rows,topk] i32"),
        Operand("counts", "write", "[rows] i32"),
    ),
    params=("topk", "ranks"),
    scratch=lambda topk, ranks: 0,
    exact="every byte",
    collective=True,
)
