"""The exported arithmetic against the eager engine: ids, caches and histories byte for byte, in every format and on every
rank count.
"""

import pytest
import torch

from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits
from palimpsest.export import programs
from palimpsest.kernels.sizes import ROW_TILE

FP32 = Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32")


@pytest.mark.parametrize(
    ("formats", "options"),
    [
        (Formats(), {"ranks": 1}),
        (Formats(), {"ranks": 4}),
        (FP32, {"ranks": 1}),
        (Formats(latent="bf16"), {"ranks": 2}),
        (Formats(latent="fp8_ds_mla"), {"ranks": 2, "preset": "tiny-dsv32"}),
        (Formats(), {"ranks": 1, "preset": "tiny-glm"}),
    ],
)
def test_core_equals_the_eager_engine(small, tmp_path, formats, options) -> None:
    assert small.differences(small.planned(formats, **options), tmp_path) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_are_no_whole_tile(small, tmp_path, ranks: int) -> None:
    """The last tile computes rows again: sums over heads and scaled columns must not count them twice."""
    one = small.planned(ranks=ranks, rows=44)
    assert small.differences(one, tmp_path, ((0, 44), (44, 33), (77, 1), (212, 44))) == []


def test_unequal_slices_are_refused(small) -> None:
    with pytest.raises(Unsupported, match="use 36 rows"):
        small.planned(ranks=4, rows=33)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -1.5, float("inf"), float("nan")])
def test_positive_zero_changes_only_the_sign_of_zero(value: float) -> None:
    x = torch.tensor([value])
    found = programs.positive_zero(x)
    wanted = torch.tensor([0.0]) if value == 0 else x
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_nan_scores_are_counted_and_come_last() -> None:
    keys, scales = torch.ones(64, 8), torch.ones(64)
    keys[3] = torch.nan
    state, nans = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    query, weights = torch.ones(2, 1, 8), torch.ones(2, 1)
    run = programs.select_tile(True)
    run(query, weights, keys, scales, torch.tensor([3, 5]), torch.tensor([0, 0]), state, nans)
    ids, counts = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    programs.select_emit(4)(state, torch.tensor([3, 5]), ids, counts)
    assert nans.tolist() == [0, 1]
    assert ids.tolist() == [[0, 1, 2, -1], [0, 1, 2, 4]]
    assert counts.tolist() == [3, 4]


def test_programs_do_not_depend_on_the_context(small) -> None:
    from palimpsest.export.template import export_template

    one, two = small.planned(tokens=256), small.planned(tokens=1 << 20)
    for name in ("sparse_attend", "gather_latent", "query_latent"):
        texts = [export_template(name, p.built.functions[name], p.built.arguments(name)) for p in (one, two)]
        assert texts[0] == texts[1], name


def test_tile_is_the_portable_one(small) -> None:
    assert small.planned(rows=64).built.stages[1].numbers["tile"] == ROW_TILE


def test_limits_are_those_of_the_program(small) -> None:
    assert small.planned().program.limits == Limits(256, 32, 1, 16)
