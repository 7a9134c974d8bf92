"""The bound a worker holds a rounding program to: right executions inside, one wrong operand outside, unknown refused."""

import pytest
import torch

from palimpsest.core.errors import BadConfig, Unavailable
from palimpsest.core.geometry import Formats
from palimpsest.export.prepare import ROUNDED
from palimpsest.export.rounding import bounded, share
from palimpsest.export.spec import Argument
from palimpsest.export.template import export_template, read_template
from palimpsest.export.worker import DRAWS, FEW, _draw, refuse_outside

FP32 = Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32")
CASES = [{}, {"formats": FP32}, {"formats": Formats(latent="fp8_ds_mla"), "preset": "tiny-dsv32"}, {"preset": "tiny-glm"}]


def exported(function, args):
    tree, program = read_template(export_template("one", function, args, exact=False))
    views = [{"size": [FEW if isinstance(n, str) else n for n in a["size"]]} for a in tree["args"]]
    return program, [_draw(tree["args"], {"views": views}, seed, exact=False) for seed in range(DRAWS)]


def copies(tensors):
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ROUNDED)
def test_eager_torch_keeps_the_bound_of_every_rounding_program(small, case, name: str) -> None:
    built = small.planned(**case).built
    program, draws = exported(built.functions[name], built.arguments(name))
    refuse_outside(lambda tensors: program.module()(*tensors), program, [copies(one) for one in draws])


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("lost", ["row", "weight", "nan", "place"])
def test_one_wrong_operand_is_outside(small, name: str, lost: str) -> None:
    """What a miscompiled program does: it loses a row, reads a stale weight, makes NaN, or writes one place beside."""
    built = small.planned().built
    program, draws = exported(built.functions[name], built.arguments(name))

    def wrong(tensors) -> None:
        inputs = copies(tensors)
        if lost == "weight":
            inputs[2 if name == "sparse_attend" else 1].view(torch.uint8).zero_()
        program.module()(*inputs)
        out = inputs[-1]
        if lost == "row":
            out[3] = 0
        elif lost == "nan":
            out[0, 0] = torch.nan
        elif lost == "place":
            out.copy_(out.roll(1, 1))
        tensors[-1].copy_(out)

    with pytest.raises(Unavailable, match=rf"argument {len(draws[0]) - 1} lies .* times its rounding error bound"):
        refuse_outside(wrong, program, draws)


MATRICES = (
    Argument("a", "fp32", (5, 300), (300, 1)),
    Argument("b", "fp32", (300, 7), (7, 1)),
    Argument("c", "fp32", (5, 7), (7, 1), mutated=True),
)


def product(a, b, c) -> None:
    c.copy_(torch.mm(a, b))


def test_sums_in_any_order_are_inside_and_a_double_roundoff_is_not() -> None:
    program, draws = exported(product, MATRICES)
    a, b, _ = draws[1]
    (wanted,) = bounded(program, draws[1]).values()
    for seed in range(20):
        order, total = torch.randperm(300, generator=torch.Generator().manual_seed(seed)), torch.zeros(5, 7)
        for k in order.tolist():
            total = total + a[:, k : k + 1] * b[k : k + 1]
        assert share(total, wanted) <= 1
    edge = wanted.value + 1.5 * wanted.error
    assert share(edge, wanted) == pytest.approx(1.5)
    assert share(torch.full((5, 7), torch.nan), wanted) == float("inf")


def test_what_cannot_round_has_no_error() -> None:
    program, draws = exported(product, MATRICES)
    (wanted,) = bounded(program, draws[0]).values()
    assert not wanted.error.any()
    assert share(draws[0][0] @ draws[0][1], wanted) == 0.0
    nearly = draws[0][0] @ draws[0][1]
    nearly[4, 6] += 2.0**-8
    assert share(nearly, wanted) == float("inf")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, b, c: c.copy_(torch.mm(a, b).cumsum(0)), "no error bound for aten.cumsum"),
        (lambda a, b, c: c.copy_(torch.where(torch.mm(a, b) > 0, 1.0, 0.0)), "no error bound for aten.gt"),
        (
            lambda a, b, c: c.copy_((torch.mm(a, b).view(torch.int32) + 1).view(torch.float32)),
            "no error bound for integer arithmetic",
        ),
        (lambda a, b, c: c.copy_(torch.mm(a, b).to(torch.bfloat16)), "bfloat16"),
    ],
)
def test_an_operation_without_a_rule_is_refused(function, message: str) -> None:
    program, draws = exported(function, MATRICES)
    with pytest.raises(BadConfig, match=message):
        bounded(program, draws[0])
