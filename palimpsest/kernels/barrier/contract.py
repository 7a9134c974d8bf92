"""Nobody passes before everybody arrived: the readers of the index history are done on every rank."""

from palimpsest.core.contract import OpContract, Operand

CONTRACT = OpContract(
    name="barrier",
    summary="global barrier; each rank's generation counter advances by one",
    operands=(Operand("signals", "update", "[ranks] i64 generations"),),
    params=("ranks",),
    scratch=lambda ranks: 0,
    exact="the generation after call n is n on every rank",
    collective=True,
)
