"""Field cases A2: the predicted bytes, the measured bytes, and how much context fits."""

import argparse
import json
from fractions import Fraction

import pytest
import torch

from palimpsest.cli import plan as verb
from palimpsest.core.errors import BadConfig, UnknownName, Unsupported, UserError
from palimpsest.core.geometry import Formats, latent_record_bytes
from palimpsest.core.spec import Limits
from palimpsest.core.units import align_up
from palimpsest.plan.account import account
from palimpsest.plan.place import place
from palimpsest.recipes import default_formats, geometry_from_config, load_geometry
from palimpsest.recipes import program as recipe_program
from palimpsest.recipes.table import preset_folder
from palimpsest.run.arena import PAGE
from palimpsest.run.meters import arena_pss


def k31(tokens: int, rows: int = 4096, ranks: int = 16):
    geometry = load_geometry("kimi-k3.1-pro")
    return recipe_program(geometry, Limits(tokens, rows, ranks), default_formats(geometry), geometry.full_layers[0])


def total(made) -> int:
    return place(made).total


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_2_01_fixed_and_per_token_bytes_predict_every_other_context(m0, ranks: int) -> None:
    bill = account(m0.program(tokens=1 << 19, ranks=ranks), place(m0.program(tokens=1 << 19, ranks=ranks)))
    for tokens in (3 << 18, 1 << 20, 1 << 21):  # staging has its full size from 419,432 tokens on
        assert total(m0.program(tokens=tokens, ranks=ranks)) == bill.fixed + Fraction(bill.per_token) * tokens


@pytest.mark.parametrize("reuse", ["on", "off"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_2_02_totals_are_the_sum_of_the_slots_and_what_is_mapped(m0, reuse: str, ranks: int) -> None:
    made = m0.program(ranks=ranks)
    bill = account(made, place(made, reuse))
    assert sum(t.slots for t in bill.totals) == sum(b.nbytes for b in made.all_buffers)
    assert sum(t.slots - t.shared + t.idle for t in bill.totals) == bill.logical
    assert bill.logical_all_ranks == ranks * bill.logical
    planned = {t.kind: align_up(t.logical, PAGE) for t in bill.totals}
    assert m0.run(lambda session: arena_pss(session.arena), ranks=ranks, reuse=reuse) == [planned] * ranks


def test_2_04_an_unknown_layout_or_family_is_refused_and_never_counts_as_zero() -> None:
    with pytest.raises(Unsupported, match="latent format 'q4'"):
        Formats(latent="q4")
    config = json.loads((preset_folder() / "glm-5.json").read_text())
    with pytest.raises((UnknownName, Unsupported)):
        geometry_from_config(config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "x")


def test_2_05_no_generic_dense_formula_for_a_sparse_model() -> None:
    """A 200K prompt costs its records and the planned rows: nothing is rows x context or heads x context."""
    made = k31(200 * 1024)
    for buffer in made.all_buffers:
        for plane in buffer.planes:
            assert not {"tokens", "rows"} <= set(plane.axes)
            assert not {"tokens", "heads"} <= set(plane.axes)
    assert made.by_name["latent_history"].nbytes == 200 * 1024 * 576
    assert made.by_name["index_history"].nbytes == 200 * 1024 * 132


@pytest.mark.parametrize("formats", [Formats(), Formats(latent="bf16"), Formats("fp32", "fp32", "fp32", "fp32")])
def test_2_07_compute_buffers_are_counted(m0, formats: Formats) -> None:
    """What the process has mapped while it runs is what was predicted: histories, activations, scratch, staging, all of it."""
    made = m0.program(formats=formats)

    def main(session):
        m0.whole(session)
        return sum(arena_pss(session.arena).values())

    assert m0.run(main, formats=formats) == [sum(align_up(s.nbytes, PAGE) for s in place(made).segments)]
    assert {s.scratch_name for s in made.steps if s.scratch} <= set(place(made).by_name)


def test_2_08_latent_models_are_not_sized_by_heads() -> None:
    """The record of a latent-attention model has no head in it, and no byte of a plan is counted twice."""
    geometry = load_geometry("kimi-k3.1-pro")
    assert latent_record_bytes(geometry, default_formats(geometry)) == 576
    made = k31(1 << 20)
    plan = place(made)
    for segment in plan.segments:
        covered, at = 0, 0
        for p in sorted((p for p in plan.places if p.kind == segment.kind), key=lambda p: p.offset):
            covered += max(0, p.stop - max(at, p.offset))
            at = max(at, p.stop)
        assert covered <= segment.nbytes
        assert at <= segment.nbytes < at + 64


@pytest.mark.parametrize("schedule", [("full", "shared", "shared", "shared"), ("full", "full", "shared", "full")])
def test_2_10_only_full_layers_have_an_index(m0, schedule: tuple[str, ...]) -> None:
    geometry = m0.geometry(schedule=schedule)
    made = [m0.program(geometry, layer=layer) for layer in range(len(schedule))]
    assert [sum(b.nbytes for b in p.all_buffers if "index" in b.name) > 0 for p in made] == [kind == "full" for kind in schedule]
    assert sum(p.by_name["index_cache"].nbytes for p in made if "index_cache" in p.by_name) == schedule.count("full") * 64 * 12
    assert all(p.by_name["latent_cache"].nbytes == 64 * 20 for p in made)


def test_2_11_the_plan_inverts_exactly(m0) -> None:
    """The largest context for the bytes of a plan is that plan's own context: for one byte less it is one page less."""

    def largest(budget: int) -> int:
        low, high = 8, 4096
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if total(m0.program(tokens=middle * 64, page=64)) <= budget else (low, middle - 1)
        return low * 64

    for tokens in (64 * 700, 64 * 1024, 64 * 4000):
        bytes_of = total(m0.program(tokens=tokens, page=64))
        assert largest(bytes_of) == tokens
        assert largest(bytes_of - 1) == tokens - 64


def test_2_11_no_legal_request_needs_more_than_its_maximum(m0) -> None:
    """Every (rows, context) pair below the prepared one needs no more: so the plan of the maximum is the maximum of the plans."""
    most = total(m0.program())
    sizes = {(rows, tokens): total(m0.program(rows=rows, tokens=tokens)) for rows in range(1, 17) for tokens in range(16, 65, 4)}
    assert max(sizes.values()) == sizes[16, 64] == most
    for (rows, tokens), size in sizes.items():
        assert size >= sizes.get((rows - 1, tokens), 0)
        assert size >= sizes.get((rows, tokens - 4), 0)


def test_2_13_a_small_chunk_writes_what_it_uses(m0) -> None:
    """Five visible tokens of 64: both histories are written up to there and not one record further."""

    def beyond(call) -> list[torch.Tensor]:
        return [plane.view(torch.uint8).view(64, -1)[5:].clone() for plane in call.views["history"].values()]

    def main(session):
        kept, found = {}, {}

        def before(step, call, chunk):
            kept[step.name] = beyond(call)

        def after(step, call, chunk):
            found[step.name] = all(m0.same(x, y) for x, y in zip(kept[step.name], beyond(call), strict=True))

        gathers = ("gather_index", "gather_latent")
        m0.fill_reusable(session, 0xA5)
        session.prefill(
            m0.hidden(5), 0, hooks=m0.Watch(before=dict.fromkeys(gathers, before), after=dict.fromkeys(gathers, after))
        )
        return found

    for ranks in (1, 2):
        assert m0.run(main, ranks=ranks) == [{"gather_index": True, "gather_latent": True}] * ranks


def test_2_14_numbers_say_whether_they_are_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    assert verb.run(parser.parse_args(["kimi-k3.1-pro", "--context", "64K", "--rows", "4096", "--ranks", "16"])) == 0
    text = capsys.readouterr().out
    assert "per rank" in text
    assert "all ranks" in text.lower() or "16 ranks" in text


def test_2_14_limits_that_cannot_be_are_refused_with_what_would_be() -> None:
    with pytest.raises(BadConfig, match="64"):
        Limits(100, 16, 1, 64)
    with pytest.raises(UserError, match="rows"):
        Limits(64, 65, 1, 64)
