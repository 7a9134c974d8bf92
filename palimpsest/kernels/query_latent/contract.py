"""Query latent: ``RMSNorm(W_qa x)``, shared by the attention query and the indexer."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import linear_scratch, norm_scratch, tile_scratch


def _scratch(hidden: int, q_lora: int, engine: str = "portable", **_: object) -> int:
    return linear_scratch(hidden, q_lora, engine=engine) + norm_scratch(q_lora) + tile_scratch(q_lora)


CONTRACT = OpContract(
    name="query_latent",
    summary="q_latent = rms_norm(hidden @ q_a.T) * q_a_norm",
    operands=(
        Operand("hidden", "read", "[rows,hidden] bf16|fp32"),
        Operand("q_a", "read", "[q_lora,hidden] bf16|fp32"),
        Operand("q_a_norm", "read", "[q_lora] bf16|fp32"),
        Operand("q_latent", "write", "[rows,q_lora] bf16|fp32"),
    ),
    params=("hidden", "q_lora", "eps", "engine"),
    scratch=_scratch,
    exact="a row's bytes depend on that row alone: not on other rows, tiles, ranks or threads",
)
