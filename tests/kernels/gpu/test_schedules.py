"""Schedules that are shipped as data, and the rule for all else."""

import functools
import itertools
from dataclasses import replace
from typing import get_args

import msgspec
import pytest

from engine.kernels.launch_hints import Release
from engine.targets.nvidia.kernels import rates
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.products import matmul, schedules
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.epilogues import STORE
from engine.targets.nvidia.kernels.products.matvec import matvec
from engine.targets.nvidia.kernels.products.prompt_products import prompt_order, prompt_tiles
from engine.targets.nvidia.kernels.products.schedules import matvec_schedule
from engine.targets.nvidia.kernels.products.stacked_matrices import (
    Schedule,
    StackedMatrices,
    usual_release,
)
from engine.targets.nvidia.kernels.products.warpgroup_matmul import WarpgroupTiles
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

Q6_K = WeightLayout(14)
END, WAITED, MET = get_args(Release)
early = functools.partial(Schedule, early=True, releases=MET)
CHIPS = sorted(path.stem for path in schedules._TUNED.glob("*.toml"))


def test_the_chips_that_are_named_have_a_file():
    assert CHIPS == ["sm_87", "sm_89", "sm_90"]


@pytest.mark.parametrize("chip", CHIPS)
def test_what_is_shipped_fits(chip):
    known = schedules._shipped(chip)
    assert known.origin.startswith(("measured", "predicted"))
    assert known.origin == "predicted" or known.products
    assert not known.products.keys() & known.early.keys()
    names = known.products.keys() | known.early.keys()
    assert known.releases.keys() | known.early_ends | known.brings.keys() <= names
    assert all(known.releases[name] != usual_release(name in known.early) for name in known.releases)
    for name, numbers in [*known.products.items(), *known.early.items()]:
        schedule = Schedule(*numbers)
        assert schedule.fits() and schedule.block_rows % 2 == 0
        for matrix in name.split(" + "):
            rows = int(matrix.split()[1].split("x")[0])
            assert rows % schedule.block_rows == 0, name


def test_what_was_measured_comes_before_the_rule():
    head, gate_up = (StackedMatrices.single(Q6_K, rows, 2048) for rows in (128256, 16384))
    assert matvec_schedule(head, Chip("sm_90", 132)) == early(32, 4, 4, streams=True)
    assert matvec_schedule(gate_up, Chip("sm_90", 132)) == Schedule(
        32, 8, 8, releases=MET, streams=True, brings=2
    )
    assert matvec_schedule(head, Chip("sm_00", 132)) != early(32, 4, 4)
    qkv = matvec_schedule(StackedMatrices.single(Q6_K, 5120, 3072), Chip("sm_90", 132))
    assert qkv == early(16, 8, 2) and qkv.name == "16_8_2_early"
    assert early(16, 4, 8, blocks=2).name == "16_4_8_early_2_blocks"
    assert Schedule(16, 4, 8).name == "16_4_8"


def test_a_mixture_has_what_was_measured_with_another_number_of_experts():
    stack = StackedMatrices.single(WeightLayout(39), 5760, 2880, ChosenExperts(4, 128, added=False))
    assert matvec_schedule(stack, Chip("sm_90", 132)) == Schedule(16, 4, 8)
    assert matvec_schedule(stack, Chip("sm_00", 132)) != Schedule(16, 4, 8)
    down = StackedMatrices.single(Q6_K, 2048, 768, ChosenExperts(8, 96, added=True))
    assert matvec_schedule(down, Chip("sm_90", 132)) == Schedule(96, 4, 4, 1, early_end=True)
    gate_up = StackedMatrices.single(WeightLayout(12), 1408, 2816, ChosenExperts(8, 64, added=False))
    assert matvec_schedule(gate_up, Chip("sm_90", 132)) == early(11, 16, 4)


@pytest.mark.parametrize(
    "ggml_type, rows, used, multiprocessors, wanted",
    [
        (13, 1536, 8, 132, Schedule(32, 4, 8)),  # Qwen3 30B-A3B in Q5_K
        (14, 1536, 8, 132, Schedule(32, 4, 8)),
        (13, 1024, 8, 132, Schedule(32, 8, 4)),  # all fit as they are
        (12, 2048, 8, 132, Schedule(32, 8, 8)),  # no thread has more rows
        (13, 1536, 8, 16, Schedule(32, 8, 8)),
        (23, 1536, 8, 132, Schedule(32, 8, 4)),  # IQ4_XS takes more registers
    ],
)
def test_all_blocks_that_choose_experts_run_at_a_time_if_they_can(
    ggml_type, rows, used, multiprocessors, wanted
):
    stack = StackedMatrices.single(WeightLayout(ggml_type), rows, 2048, ChosenExperts(used, 128, added=False))
    assert matvec_schedule(stack, Chip("sm_00", multiprocessors)) == wanted


def test_a_search_tries_early_weights_where_kernels_are_launched_early():
    stack, near = StackedMatrices.single(Q6_K, 3072, 3072), Schedule(48, 4, 4)
    assert not any(s.early for s in schedules.candidates(stack, near))
    tried = schedules.candidates(stack, near, Chip("sm_00", 132, launches_early=True))
    assert near not in tried and early(48, 4, 4) in tried and len(tried) == len(set(tried))
    assert not any(s.early and s.blocks for s in tried)


def test_a_search_tries_how_a_product_is_launched():
    stack, chip = StackedMatrices.single(Q6_K, 3072, 3072), Chip("sm_00", 132, launches_early=True)
    usual = lambda s: s.releases == usual_release(s.early)
    launched = lambda s: (not usual(s) and s.releases, s.early_end, s.brings, s.streams, s.together)
    for s in (Schedule(48, 4, 4), early(48, 4, 4), early(48, 4, 4, releases=WAITED, early_end=True)):
        near = schedules.neighbours(stack, s, chip)
        ways = [{"releases": release} for release in (END, WAITED, MET) if release != s.releases]
        ways += [
            {"early_end": not s.early_end},
            {"streams": True},
            {"together": "weights"},
            {"together": "all"},
            {"brings": 4},
        ]
        first, others = near[: len(ways)], near[len(ways) :]
        assert first == [replace(s, **way) for way in ways]
        assert others and all(launched(s) == launched(other) for other in others)
        assert all(launched(s) == launched(other) for other in schedules.candidates(stack, s, chip))
    assert not any(any(launched(other)) for other in schedules.neighbours(stack, Schedule(48, 4, 4)))


@pytest.mark.parametrize(
    "of_schedule, starts_next, wanted",
    [
        (END, False, END),
        (WAITED, False, WAITED),
        (MET, False, MET),
        (END, True, WAITED),
        (WAITED, True, WAITED),
        (MET, True, MET),
    ],
)
def test_a_schedule_says_when_the_next_kernel_may_start(of_schedule, starts_next, wanted):
    for is_early in (False, True):
        schedule = Schedule(4, 8, 2, early=is_early, releases=of_schedule)
        stack = StackedMatrices.single(Q6_K, 64, 256)
        kernel = matvec(stack, schedule, STORE, "t", starts_next=starts_next)
        assert kernel.hints.releases == wanted and bool(kernel.hints.waits_for) == is_early


def test_each_way_to_launch_a_schedule_has_a_name():
    ways = itertools.product((False, True), (END, WAITED, MET))
    assert len({Schedule(4, 8, 2, early=is_early, releases=way).name for is_early, way in ways}) == 6


def test_large_products_with_a_codebook_take_their_vector_in_digits():
    launches_early, iq4 = Chip("sm_00", 132, launches_early=True), WeightLayout(23)
    large, small = (StackedMatrices.single(iq4, rows, 4096) for rows in (28672, 2048))
    digits = schedules.with_digits(large, launches_early)
    assert digits.digits and digits.name == "IQ4_XS 28672x4096 in digits" != large.name
    assert not schedules.with_digits(small, launches_early).digits
    assert not schedules.with_digits(large, Chip("sm_00", 132)).digits
    both = StackedMatrices(((iq4, 28672), (Q6_K, 256)), 4096)
    few, small_floats = ChosenExperts(4, 32, added=True), WeightLayout(39)
    assert schedules.with_digits(StackedMatrices.single(small_floats, 2880, 2880, few), launches_early).digits
    others = [StackedMatrices.single(layout, 28672, 4096) for layout in (Q6_K, small_floats)]
    others += [StackedMatrices.single(iq4, 512, 2048, few), both]
    for experts in (ChosenExperts(32, 32, added=False, all_of_them=True), replace(few, used=2)):
        others.append(
            StackedMatrices.single(iq4 if experts.all_of_them else small_floats, 2048, 2048, experts)
        )
    for other in others:
        assert schedules.with_digits(other, launches_early) == other


def test_integers_take_their_vector_in_digits_where_that_was_timed():
    timed, other = (StackedMatrices.single(WeightLayout(12), rows, 5120) for rows in (34816, 24576))
    h200 = Chip("sm_90", 132, launches_early=True)
    digits = schedules.with_digits(timed, h200)
    assert digits.digits and matvec_schedule(digits, h200) == early(80, 2, 4, together="all")
    head = schedules.with_digits(StackedMatrices.single(Q6_K, 256000, 2304), h200)
    assert head.digits and matvec_schedule(head, h200) == early(36, 4, 4, together="all")
    for stack, chip in (
        (other, h200),
        (timed, Chip("sm_90", 114, launches_early=True)),
        (timed, Chip("sm_90", 132)),
    ):
        assert schedules.with_digits(stack, chip) == stack


def test_gate_and_up_of_many_integers_come_in_digits_with_all_loads_together():
    h200, place = Chip("sm_90", 132, launches_early=True), "gate and up"
    large, small = (StackedMatrices.single(WeightLayout(12), rows, 3072) for rows in (46080, 4096))
    digits = schedules.with_digits(large, h200, place)
    assert digits.digits and matvec_schedule(digits, h200, place).together == "all"
    for cols, cut in ((1536, (24, 4, 4)), (3072, (48, 2, 4)), (4096, (64, 2, 4)), (5120, (80, 1, 4))):
        stack = replace(StackedMatrices.single(WeightLayout(12), 65536, cols), digits=True)
        s = matvec_schedule(stack, h200, place)
        assert (s.threads, s.groups, s.rows) == cut  # a row in one step, in four warps at most
    others = [small, StackedMatrices.single(WeightLayout(3), 46080, 3072)]  # Q4_1 was not timed
    assert all(schedules.with_digits(stack, h200, place) == stack for stack in others)
    for chip, at in ((h200, "down"), (replace(h200, multiprocessors=114), place)):
        assert schedules.with_digits(large, chip, at) == large
    of_experts = {
        added: StackedMatrices.single(WeightLayout(12), 4096, 4096, ChosenExperts(4, 9, added))
        for added in (False, True)
    }
    for added, stack in of_experts.items():
        digits = schedules.with_digits(stack, h200)
        assert digits.digits and matvec_schedule(digits, h200).together == "all"
        fewer = replace(stack, experts=ChosenExperts(1, 9, added))
        assert schedules.with_digits(fewer, h200) == fewer


def test_down_in_six_bits_has_all_loads_together_where_nobody_timed_it():
    h200 = Chip("sm_90", 132, launches_early=True)
    down, other, timed = (
        StackedMatrices.single(WeightLayout(kind), rows, cols)
        for kind, rows, cols in ((14, 5120, 14336), (13, 5120, 14336), (14, 2560, 9728))
    )
    found = [matvec_schedule(s, h200, "down") for s in (down, other, timed)]
    assert [s.together for s in found] == ["all", "", ""]
    assert [s.early_end for s in found] == [True, True, False]
    assert matvec_schedule(down, h200).together == ""


def test_what_nobody_timed_does_for_the_next_product_what_gained_with_all_models():
    chip, kinds = Chip("sm_00", 132, launches_early=True), [WeightLayout(n) for n in (12, 8, 1)]
    gates, outs = ([StackedMatrices.single(k, rows, 3072) for k in kinds] for rows in (46080, 3072))
    found = [matvec_schedule(stack, chip, "gate and up") for stack in gates]
    assert [s.releases == WAITED for s in found] == [True, True, False] and not any(s.brings for s in found)
    assert [(s.together, s.streams) for s in found] == [("", False), ("all", True), ("", False)]
    found = [matvec_schedule(stack, chip, "attention's output") for stack in outs]
    assert [s.brings for s in found] == [2, 0, 0]
    assert [s.releases == usual_release(s.early) for s in found] == [True, True, False]
    assert matvec_schedule(outs[0], chip) == replace(found[0], brings=0)
    places: list[schedules.Place] = ["", "gate and up", "attention's output", "down"]
    found = [matvec_schedule(StackedMatrices.single(kinds[2], 3072, 8192), chip, place) for place in places]
    assert [s.releases == WAITED for s in found] == [False, False, True, True]
    timed, chip = StackedMatrices.single(Q6_K, 16384, 2048), replace(chip, capability="sm_90")
    assert matvec_schedule(timed, chip, "gate and up") == Schedule(
        32, 8, 8, releases=MET, streams=True, brings=2
    )


def test_gate_and_up_of_experts_that_nobody_timed_load_early_where_kernels_can():
    kinds = [(WeightLayout(12), False), (WeightLayout(12), True), (Q6_K, False)]
    stacks = [StackedMatrices.single(kind, 3072, 2560, ChosenExperts(6, 64, added)) for kind, added in kinds]
    for launches_early in (False, True):
        chip = Chip("sm_90", 132, launches_early=launches_early)
        assert [matvec_schedule(stack, chip).early for stack in stacks] == [launches_early, False, False]


def test_a_search_tries_first_what_the_model_finds_cheap():
    stack, chip = StackedMatrices.single(Q6_K, 3072, 3072), Chip("sm_00", 132, launches_early=True)
    choice = matvec_schedule(stack, chip)
    assert schedules.candidates(stack, Schedule(48, 4, 4), chip)[0] == choice
    assert choice not in schedules.candidates(stack, choice, chip)


@pytest.mark.parametrize("multiprocessors", [8, 16, 24, 128])
@pytest.mark.parametrize("rows, cols", [(1, 32), (898, 896), (2048, 8192), (4096, 4096), (151936, 1024)])
def test_a_predicted_chip_has_its_blocks(rows, cols, multiprocessors):
    s = matvec_schedule(StackedMatrices.single(Q6_K, rows, cols), Chip("sm_87", multiprocessors))
    assert s.fits() and s.block_rows % 2 == 0
    wanted = schedules._shipped("sm_87").rule.blocks_a_multiprocessor * multiprocessors
    assert s.rows == 1 or rows // s.block_rows >= wanted or rows // s.groups < wanted


def test_a_file_with_a_mistake_is_not_read_past(tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, "_TUNED", tmp_path)
    (tmp_path / "sm_11.toml").write_text("[rule]\nblocks = 3")
    with pytest.raises(msgspec.ValidationError, match="blocks"):
        matvec_schedule(StackedMatrices.single(Q6_K, 2048, 2048), Chip("sm_11"))


@pytest.mark.parametrize(
    "rows, cols, paired, wanted",
    [  # rows of 128 or 64, and parts
        (24576, 4096, True, (4, 1)),
        (6144, 1024, True, (4, 1)),
        (6144, 4096, False, (4, 2)),
        (4096, 12288, False, (4, 2)),
        (4096, 4096, False, (4, 2)),
        (3072, 3072, False, (4, 4)),
    ],
)
def test_tiles_of_prompts_leave_few_multiprocessors_idle(rows, cols, paired, wanted, monkeypatch):
    monkeypatch.setattr(matmul, "is_cuda", lambda: True)
    tiles = matmul.tiles_for(WeightLayout(12), 512, rows, cols, Chip("sm_90", 132), paired)
    assert tiles.staged and (tiles.across, tiles.parts) == wanted


@pytest.mark.parametrize(
    "tokens, rows, cols, paired, wanted",
    [  # tokens, 64s of rows, groups and parts of the fastest that was timed on an H200
        (
            512,
            28672,
            4096,
            True,
            (256, 1, 2, 1, 2, (25344, WarpgroupTiles(128, 1, 2, 1))),
        ),  # a round is a third full
        (512, 24576, 4096, True, (256, 1, 2, 1)),  # 204 us, 225 with (128, 2, 1, 1)
        (512, 4096, 12288, False, (256, 1, 2, 2)),  # 94 us, 106 with (128, 2, 1, 2)
        (512, 5120, 3072, False, (256, 1, 2, 3)),  # 38 us, 45 with one part
        (128, 24576, 4096, True, (128, 1, 1, 1)),  # 71 us, 79 with (128, 2, 1, 1)
        (128, 4096, 12288, False, (128, 2, 1, 8)),  # 33.2 us, 33.7 with (128, 1, 1, 4, 4)
        (64, 5120, 3072, False, (64, 1, 1, 3, 4)),  # 9.5 us, 12.1 with two parts
    ],
)
def test_tiles_of_warpgroups(tokens, rows, cols, paired, wanted):
    chip = Chip("sm_90", 132, own_rates=rates.H200, has_warpgroups=True)
    tiles = prompt_tiles(WeightLayout(12), tokens, rows, cols, chip, paired, "eights")
    assert tiles == WarpgroupTiles(*wanted)


@pytest.mark.parametrize(
    "tokens, rows, cols, wanted",
    [  # tokens, groups, parts and steps ahead of those that were timed in steps on an H200
        (512, 28672, 4096, (256, 2, 1, 2)),  # 182 us with the rest, 205 without
        (512, 4096, 14336, (256, 2, 2, 2)),  # 8 us less than (128, 2, 1, 4)
        (512, 6144, 4096, (128, 3, 1, 3)),  # 11 us less than (256, 2, 1, 2)
        (64, 28672, 4096, (64, 2, 1, 2)),  # 62 us, as much as with 6 steps
        (64, 4096, 14336, (64, 2, 4, 6)),  # 34 us
    ],
)
def test_tiles_of_float16(tokens, rows, cols, wanted):
    chip = Chip("sm_90", 132, own_rates=rates.H200, has_warpgroups=True)
    tiles = prompt_tiles(WeightLayout(1), tokens, rows, cols, chip, rows > 6144, "halves")
    assert (tiles.tokens, tiles.groups, tiles.parts, tiles.depth) == wanted
    assert (tiles.rest is not None) == (tokens == 512 and rows > 6144)


def test_the_order_of_activations_is_that_in_which_all_products_take_least_time():
    hopper, other = Chip("sm_90", 132, own_rates=rates.H200, has_warpgroups=True), Chip("sm_90", 132)
    f16, q4, q8 = ((WeightLayout(kind), 16384, 3072) for kind in (1, 12, 8))
    assert [prompt_order([q4], n, hopper) for n in (32, 64, 128)] == ["columns", "columns", "eights"]
    assert [prompt_order([q4], n, other) for n in (64, 128)] == ["columns", "fragments"]
    assert [prompt_order([f16, f16], n, hopper) for n in (32, 64)] == ["columns", "halves"]
    others = ([f16, q4], True), ([f16, f16], False), ([f16, (WeightLayout(1), 100, 3072)], True)
    assert [prompt_order(some, 128, hopper, are_all) for some, are_all in others] == ["eights"] * 3
    assert [prompt_order([q8] + [q4] * n, 64, hopper) for n in (1, 9)] == ["eights", "columns"]


@pytest.mark.parametrize(
    "tokens, rows, parts, depth",
    [
        (64, 28672, 1, 8),
        (64, 6144, 4, 4),
        (128, 28672, 1, 4),
        (128, 6144, 4, 2),
    ],  # 75 us in place of 81, 20 of 25, ...
)
def test_floats_of_16_bits_load_further_ahead_where_as_many_rounds_of_blocks_fit(tokens, rows, parts, depth):
    chip = Chip("sm_90", 132, own_rates=rates.H200, has_warpgroups=True)
    tiles = prompt_tiles(WeightLayout(1), tokens, rows, 4096, chip, rows > 6144, "eights")
    assert (tiles.parts, tiles.depth) == (parts, depth)


def test_floats_of_32_bits_have_low_tiles_in_warpgroups():
    chip = Chip("sm_90", 132, own_rates=rates.H200, has_warpgroups=True)
    assert prompt_tiles(WeightLayout(12), 128, 4096, 12288, chip, False, "eights").tall == 2
    assert prompt_tiles(WeightLayout(0), 128, 4096, 12288, chip, False, "eights").tall == 1


@pytest.mark.parametrize(
    "ggml_type, tokens, rows, parts, staged",
    [
        (11, 512, 24576, 1, False),  # Q3_K: 278 us in place of 312 on an H200
        (10, 512, 24576, 1, False),  # Q2_K: 276 us in place of 296
        (12, 512, 24576, 1, True),  # Q4_K: 305 us without
        (39, 512, 24576, 1, True),  # MXFP4: 301 us in place of 289 without
        (11, 128, 24576, 1, True),  # one round of blocks
        (11, 512, 4096, 2, True),
    ],
)
def test_types_of_few_bits_copy_no_activations_in_several_rounds(
    ggml_type, tokens, rows, parts, staged, monkeypatch
):
    monkeypatch.setattr(matmul, "is_cuda", lambda: True)
    paired = rows == 24576
    for is_early in (True, False):
        chip = Chip("sm_00", 132, launches_early=is_early)
        tiles = matmul.tiles_for(WeightLayout(ggml_type), tokens, rows, 4096, chip, paired)
        assert (tiles.parts, tiles.staged) == (parts, staged or not is_early)
