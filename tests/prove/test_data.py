"""Case data: the same bytes from any direction, legal codes, and lattice plants that hold by counting."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.core.errors import CapacityError
from palimpsest.core.geometry import LATENT_FORMATS, Formats, latent_record_bytes
from palimpsest.prove.cases import Records, cases, profile, records_of
from palimpsest.prove.data import BLOCK, Data, Regions, encode_e4m3, generator, to_bf16
from palimpsest.prove.exact import E4M3_VALUES, IndexRow, decode_keys, exact_cutoff, filtered_scores, nan_codes
from palimpsest.prove.ties import tie_presence

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def table():
    return {c.id: c for c in cases(profile("small"), 128)}


def dataset(make_geometry, table, case="C03", formats=Formats(), **geometry):  # noqa: B008
    return Data(11, make_geometry(**geometry), formats, table[case])


def test_encoder_matches_torch_on_every_kind_of_value():
    rng = np.random.default_rng(0)
    finite = E4M3_VALUES[~np.isnan(E4M3_VALUES)]
    middle = (finite[:126][1:] + finite[:126][:-1]) / 2
    values = np.concatenate([rng.standard_normal(4000) * 100, finite, middle, -middle, [0.0, -0.0, 448, -448]])
    values = values[np.abs(values) <= 448]
    theirs = torch.from_numpy(values).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(encode_e4m3(values.astype(np.float32).astype(np.float64)), theirs)


def test_bf16_rounding_matches_torch():
    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    assert np.array_equal(to_bf16(values), torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))


def test_names_give_independent_generators():
    first = generator(1, "a", 0).integers(0, 1 << 62)
    assert first == generator(1, "a", 0).integers(0, 1 << 62)
    assert len({first, *(int(generator(*n).integers(0, 1 << 62)) for n in ((2, "a", 0), (1, "b", 0), (1, "a", 1)))}) == 4


@pytest.mark.parametrize("case", ["C02", "C03"])
@pytest.mark.parametrize("index", ["fp8", "fp32"])
@settings(max_examples=8, deadline=None)
@given(start=st.integers(0, 3000), length=st.integers(0, 1096), seed=st.integers(0, 99))
def test_any_range_and_any_order_give_the_same_records(make_geometry, table, case, index, start, length, seed):
    data = dataset(make_geometry, table, case, Formats(index=index))
    values, scales = data.index_records(start, start + length)
    ids = np.random.default_rng(seed).permutation(np.arange(start, start + length))
    picked, sigma = data.read_index(ids)
    assert values.dtype == np.uint8
    assert values.shape == (length, records_of(data.geometry, data.formats).values)
    assert np.array_equal(picked, values[ids - start])
    if index == "fp8":
        assert scales.dtype == np.float32
        assert np.array_equal(sigma, scales[ids - start])
    else:
        assert scales is None
        assert sigma is None


@pytest.mark.parametrize("latent", LATENT_FORMATS)
def test_latent_records_are_random_access_and_finite(make_geometry, table, latent):
    data = dataset(make_geometry, table, "C02", Formats(latent=latent))
    records = data.latent_records(1000, 1100)
    assert records.shape == (100, latent_record_bytes(data.geometry, data.formats))
    ids = np.array([1099, 1000, 1024, 1023])
    assert np.array_equal(data.read_latent(ids), records[ids - 1000])
    assert len(np.unique(records, axis=0)) == 100
    lora = records[:, :512] if latent.startswith("fp8") else records[:, :0]
    assert not nan_codes(lora)
    assert not len(data.latent_records(5, 5))


def test_all_cases_share_one_latent_history_and_natural_cases_one_index_history(make_geometry, table):
    first, second = dataset(make_geometry, table, "C02"), dataset(make_geometry, table, "C08")
    assert np.array_equal(first.index_records(0, 64)[0], second.index_records(0, 64)[0])
    assert np.array_equal(first.latent_records(0, 64), dataset(make_geometry, table, "C03").latent_records(0, 64))
    other = dataclasses.replace(first, master=12)
    assert not np.array_equal(first.index_records(0, 64)[0], other.index_records(0, 64)[0])


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_natural_records_are_legal(make_geometry, table, scale_format):
    data = dataset(make_geometry, table, "C02", scale_format=scale_format)
    values, scales = data.index_records(0, 2 * BLOCK)
    assert not nan_codes(values)
    assert len(np.unique(values)) > 100
    assert (scales > 0).all()
    powers = np.frexp(scales)[0] * 2 == 1
    assert powers.all() if scale_format == "ue8m0" else not powers.all()


def test_hidden_rows_follow_their_name(make_geometry, table):
    data, again = dataset(make_geometry, table, "C03"), dataset(make_geometry, table, "C11")
    rows = data.hidden(table["C03"].steps[0], 0, 256)
    assert rows.dtype == np.float32
    assert rows.shape == (256, 64)
    assert np.array_equal(rows, again.hidden(table["C11"].steps[0], 0, 256))
    assert np.array_equal(rows[100:130], data.hidden(table["C03"].steps[0], 100, 130))
    steps = table["C08"].steps
    shrinking = dataset(make_geometry, table, "C08")
    assert not np.array_equal(shrinking.hidden(steps[0], 0, 1), shrinking.hidden(steps[1], 0, 1))


def lattice_scores(data, step, row, n):
    query, weights = data.queries(step, row, row + 1)
    values, scales = data.index_records(0, n)
    index = IndexRow.from_bytes(query[0], weights[0], data.formats.index)
    near = filtered_scores(index, decode_keys(values, data.formats.index), scales)
    return index, near


@pytest.mark.parametrize("case", ["C01", "C03", "C05", "C09", "C11"])
@pytest.mark.parametrize(("heads", "dim"), [(4, 128), (64, 128), (1, 32)])
def test_lattice_plants_hold(make_geometry, table, case, heads, dim):
    data = dataset(make_geometry, table, case, heads=heads, dim=dim)
    step, chosen = table[case].steps[0], table[case]
    end, tied, sides, shards = 132 * 4096 // 576, 0, 0, 0
    rows = sorted({0, 1, 2, 5, step.rows // 2, step.rows - 1, step.rows - 2, data.zero_row(step)})
    for row in [r for r in rows if data.lattice_row(step, r)]:
        n = step.history + row + 1
        _, near = lattice_scores(data, step, row, n)
        assert not near.error.any(), "lattice scores are exact"
        assert np.array_equal(near.value, near.value.astype(np.float32))
        cut = exact_cutoff(near.value, near.error, min(128, n), lambda ids: [])
        seen = tie_presence(cut, alias_end=end, page=16, ranks=16)
        if row == data.zero_row(step):
            assert not near.value.any()
            assert len(cut.equal) == n
            assert n <= 128 or seen.tied
        else:
            planted = [i for i in chosen.planted if i < n]
            assert set(planted) <= set(cut.above.tolist()) | (set(cut.equal.tolist()) if n <= 128 else set())
        if data.tie_row(step, row):
            assert seen.tied
            assert set(cut.equal % chosen.tie_stride) == {chosen.tie_stride - 1}
        tied, sides, shards = tied + seen.tied, max(sides, seen.sides), max(shards, seen.shards)
    assert tied >= 1 + sum(data.tie_row(step, row) for row in rows)
    assert chosen.minima.tie_rows == 1 + sum(data.tie_row(step, row) for row in range(step.rows))
    assert sides >= chosen.minima.sides
    assert shards >= chosen.minima.shards


def test_lattice_rows_of_a_mixed_case_alternate(make_geometry, table):
    data, step = dataset(make_geometry, table, "C01"), table["C01"].steps[0]
    assert [data.lattice_row(step, r) for r in range(4)] == [True, False, True, False]
    query, weights = data.queries(step, 0, 4)
    assert set(np.unique(query[0])) <= {0, 0x38, 0xB8}
    assert set(np.unique(np.abs(weights[0]))) <= {1, 2}
    assert len(np.unique(query[1])) > 50
    again, _ = data.queries(step, 2, 4)
    assert np.array_equal(query[2:], again)


def test_no_rows_no_queries(make_geometry, table):
    data, step = dataset(make_geometry, table, "C07"), table["C07"].steps[0]
    assert data.zero_row(step) is None
    assert data.queries(step, 0, 0)[0].shape == (0, 4, 128)
    assert data.hidden(step, 0, 0).shape == (0, 64)


@given(st.integers(16, 512))
def test_regions_order_the_three_levels(dim):
    regions = Regions.of(dim)
    assert 0 <= regions.ordinary < regions.tie < regions.beacon
    assert regions.beacon + regions.tie + regions.ordinary <= dim


def test_small_dims_are_refused():
    with pytest.raises(CapacityError, match="index dim 8"):
        Regions.of(8)


def test_fp32_index_lattice(make_geometry):
    formats = Formats(index="fp32", latent="fp32")
    made = {c.id: c for c in cases(profile("small"), 128, Records(512, 512, 2304))}
    data = Data(3, make_geometry(), formats, made["C03"])
    _, near = lattice_scores(data, made["C03"].steps[0], 0, 3841)
    assert np.array_equal(near.value, np.rint(near.value))
