"""Gather the complete history from the sharded caches of all ranks."""

from palimpsest.core.contract import OpContract, Operand

CONTRACT = OpContract(
    name="gather_history",
    summary="history planes [tokens, bytes] from pages owned round robin; round by round through peer staging",
    operands=(
        Operand("cache", "read", "[rank_pages,page*record] u8"),
        Operand("staging", "update", "[staging bytes] u8"),
        Operand("history", "write", "planes of [tokens, plane bytes]: ``record`` = plane bytes joined by +"),
    ),
    params=("record", "page", "ranks"),
    scratch=lambda record, page, ranks: 0,
    exact="every byte; writes tokens [0, history+rows) and nothing beyond",
    collective=True,
)
