"""Query latent: ``RMSNorm(W_qa x)``, shared by the attention query and the indexer."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import linear_scratch

CONTRACT = OpContract(
    name="query_latent",
    summary="q_latent = rms_norm(hidden @ q_a.T) * q_a_norm",
    operands=(
        Operand("hidden", "read", "[rows,hidden] bf16|fp32"),
        Operand("q_a", "read", "[q_lora,hidden] bf16|fp32"),
        Operand("q_a_norm", "read", "[q_lora] bf16|fp32"),
        Operand("q_latent", "write", "[rows,q_lora] bf16|fp32"),
    ),
    params=("hidden", "q_lora", "eps"),
    scratch=lambda hidden, q_lora, eps: linear_scratch(hidden, q_lora) + 32 * q_lora * 4 * 4,
    exact="a row's bytes depend on that row alone: not on other rows, tiles, ranks or threads",
)
