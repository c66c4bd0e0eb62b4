"""The cost model, without a tuned table: pure, deterministic, only valid kernels, sane where the answer is plain."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from itertools import product

import pytest
import tuned_tables
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp8_cutlass.cost_model import TERMS
from mxfp8_cutlass.generator.config_space import sm90_configs, sm90_k_group_configs
from mxfp8_cutlass.generator.sm100_config import SM100_TILES, sm100_configs
from mxfp8_cutlass.select import (
    choose,
    make_facts,
    rank,
    rank_k_groups,
    rank_stacked,
    select_k_groups,
    select_kernel,
    select_stacked,
)
from mxfp8_cutlass.tuned import table

FACTS = {"promotion_k": 128, "sfb_rows": 128, "element_a": "e4m3", "element_b": "e4m3", "out": "bf16"}
SCALES = [(128, 128), (128, 1), (32, 1)]

dimensions = st.tuples(
    st.integers(0, 70000), st.integers(1, 1000).map(lambda n: 16 * n), st.integers(1, 500).map(lambda k: 32 * k)
)


@pytest.fixture(autouse=True, scope="module")
def no_table(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        tuned_tables.use(patch, tmp_path_factory.mktemp("tuned"))
        yield
    tuned_tables.forget()


def stacked(m, n, k, groups, *, split=True, **facts):
    return select_stacked(m, n, k, groups, "90a", *(FACTS | facts).values(), split=split)


def test_every_combination_of_facts_has_kernels_and_gets_one_of_its_own():
    for (promotion_k, sfb_rows), a, b, out in product(
        SCALES, ("e4m3", "e5m2"), ("e4m3", "e5m2"), ("bf16", "fp16", "fp32")
    ):
        facts = {"promotion_k": promotion_k, "sfb_rows": sfb_rows, "element_a": a, "element_b": b, "out": out}
        for config in (select_kernel([(500, 768, 4096)] * 8, **facts), stacked(4000, 768, 4096, 8, **facts)):
            assert {name: getattr(config, name) for name in facts} == facts
            assert config in sm90_configs()


@given(problems=st.lists(dimensions, min_size=1, max_size=40), scales=st.sampled_from(SCALES))
@settings(max_examples=60, deadline=None)
def test_rank(problems, scales):
    facts = {"promotion_k": scales[0], "sfb_rows": scales[1]}
    candidates = rank(problems, **facts)
    configs = [c.config for c in candidates]
    assert set(configs) == {c for c in sm90_configs() if all(getattr(c, k) == v for k, v in (FACTS | facts).items())}
    assert len(set(configs)) == len(configs)
    assert all(c.check() is None for c in configs)
    times = [c.total_us for c in candidates]
    assert times == sorted(times)
    for c in candidates:
        assert c.total_us == max(c.waves_us, c.memory_us)
        assert c.stage_us == max(c.multiply_us, c.l2_us)
        assert 0 < c.efficiency <= 1
        assert all(getattr(c, term) >= 0 for term in TERMS)
    assert select_kernel(problems, **facts) == configs[0]
    assert rank(list(reversed(problems)), **facts)[0].total_us == pytest.approx(times[0])


def test_terms_are_the_numbers_of_a_candidate():
    candidate = rank([(100, 256, 256)])[0]
    assert set(TERMS) == {field.name for field in fields(candidate)} - {"config"}
    assert all(isinstance(getattr(candidate, term), int | float) for term in TERMS)


@given(
    m=st.integers(0, 2**20),
    n=st.integers(1, 500),
    k=st.integers(1, 300),
    groups=st.integers(1, 1024),
    split=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_number_of_groups_whose_sizes_only_the_device_knows(m, n, k, groups, split):
    config = stacked(m, 16 * n, 32 * k, groups, split=split)
    assert config in sm90_configs()
    assert config.check() is None


@given(
    m=st.integers(1, 500),
    n=st.integers(1, 500),
    tokens=st.integers(0, 2**20),
    groups=st.integers(1, 1024),
    rows=st.sampled_from([1, 128]),
)
@settings(max_examples=60, deadline=None)
def test_groups_that_cut_k(m, n, tokens, groups, rows):
    facts = make_facts(128, rows, "e4m3", "e5m2", "fp32")
    candidates = rank_k_groups(16 * m, 16 * n, tokens, groups, "90a", facts)
    assert {c.config for c in candidates} == {
        c for c in sm90_k_group_configs() if all(getattr(c, name) == value for name, value in facts.items())
    }
    assert [c.total_us for c in candidates] == sorted(c.total_us for c in candidates)
    config = select_k_groups(16 * m, 16 * n, tokens, groups, "90a", *facts.values())
    assert config == candidates[0].config
    assert select_k_groups(16 * m, 16 * n, tokens, groups, "90a", *facts.values()) is config


def test_groups_that_cut_k_have_no_exact_kernel():
    with pytest.raises(ValueError, match="promotion_k is 32"):
        select_k_groups(512, 512, 1000, 4, "90a", 32, 1, "e4m3", "e4m3", "fp32")


@pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 130, 1023, 1024])
def test_any_number_of_problems(groups):
    problems = [(7 * g % 300, 768, 1024) for g in range(groups)]
    config = select_kernel(problems)
    assert config.check() is None
    assert select_kernel([(300, 768, 1024)] * groups) == stacked(300, 768, 1024, groups, split=False)


def test_cached_and_equal_however_the_list_is_given():
    problems = [(100, 512, 512), (0, 512, 512), (3, 512, 512)]
    first = select_kernel(problems)
    assert select_kernel(tuple(problems)) is first
    assert select_kernel([list(problem) for problem in problems]) is first
    assert stacked(1000, 512, 512, 4) is stacked(1000, 512, 512, 4)


def test_the_same_in_another_process():
    code = (
        "import sys; from mxfp8_cutlass.select import select_kernel;"
        "print(select_kernel([(100, 4096, 7168)] * 3 + [(0, 4096, 7168)]).name)"
    )
    names = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    }
    assert names == {select_kernel([(100, 4096, 7168)] * 3 + [(0, 4096, 7168)]).name}


@pytest.mark.parametrize(
    "sizes", [[(1, 4096, 7168)] * 8, [(16, 2048, 7168)] * 32, [(0, 4096, 7168)] * 7 + [(5, 4096, 7168)]]
)
def test_decode_takes_small_tiles(sizes):
    assert select_kernel(sizes).tile_m == 64


def test_large_products_take_large_tiles():
    for config in (select_kernel([(8192, 28672, 4096)] * 8), stacked(65536, 28672, 4096, 8)):
        assert (config.tile_m, config.tile_n) == (128, 192)


@pytest.mark.parametrize(("scales"), SCALES)
def test_tiles_do_not_shrink_as_groups_grow(scales):
    facts = {"promotion_k": scales[0], "sfb_rows": scales[1]}
    areas = []
    for m in (1, 64, 512, 4096, 65536):
        config = select_kernel([(m, 8192, 4096)] * 8, **facts)
        areas.append(config.tile_m * config.tile_n)
    assert areas == sorted(areas)


@pytest.mark.parametrize("tokens", [65, 70, 257, 300])
def test_ragged_groups_are_not_padded_more_than_they_must(tokens):
    """128 groups, each a little above a multiple of 64 rows: of equal tiles otherwise, the one with less waste wins."""
    candidates = rank([(tokens, 2048, 4096)] * 128)
    by_shape = {(c.config.tile_m, c.config.tile_n, c.config.cluster_m, c.config.cluster_n): c for c in candidates}
    wide, tall = by_shape[128, 128, 1, 2], by_shape[128, 128, 2, 1]
    assert tall.efficiency <= wide.efficiency
    assert wide.total_us <= tall.total_us
    assert candidates[0].config.cluster_m == 1


def test_times_grow_with_the_problem():
    base = rank([(1000, 4096, 4096)] * 8)[0].total_us
    assert rank([(1000, 4096, 8192)] * 8)[0].total_us > base
    assert rank([(1000, 8192, 4096)] * 8)[0].total_us > base
    assert rank([(4000, 4096, 4096)] * 8)[0].total_us > base
    assert rank([(1000, 4096, 4096)] * 8, promotion_k=32, sfb_rows=1)[0].total_us > base


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([], {}, "problem_sizes has 0 entries"),
        ([(1, 16, 32)] * 1025, {}, "problem_sizes has 1025 entries"),
        ([(1, 16, 32), (-1, 16, 32)], {}, r"problem_sizes\[1\] is \(-1, 16, 32\)"),
        ([(1, -16, 32)], {}, r"problem_sizes\[0\] is \(1, -16, 32\)"),
        ([(1, 16, -32)], {}, r"problem_sizes\[0\] is \(1, 16, -32\)"),
        ([(1, 0, 32)], {}, r"problem_sizes\[0\] is \(1, 0, 32\)"),
        ([(1, 16, 0)], {}, r"problem_sizes\[0\] is \(1, 16, 0\)"),
        ([(1, 24, 32)], {}, "N must be a multiple of 16"),
        ([(1, 16, 48)], {}, "K of 32"),
        ([(1, 16, 32)], {"target_sm": "80"}, "target_sm is '80': there are grouped GEMM kernels for 90a, 100a"),
        ([(1, 16, 32)], {"target_sm": "100a", "promotion_k": 128}, "promotion_k is 128: it must be None for 100a"),
        ([(1, 16, 32)], {"target_sm": "100a", "sfb_rows": 1}, "sfb_rows is 1: it must be None for 100a"),
        ([(1, 16, 32)], {"target_sm": "100a", "element_b": "fp8"}, "element_b is 'fp8'"),
        ([(1, 16, 32)], {"target_sm": "100a", "out": "fp64"}, "out is 'fp64'"),
        ([(1, 16, 32)], {"promotion_k": 64}, "promotion_k is 64: it must be one of"),
        ([(1, 16, 32)], {"sfb_rows": 2}, "sfb_rows is 2: it must be one of"),
        ([(1, 16, 32)], {"element_a": "e3m2"}, "element_a is 'e3m2'"),
        ([(1, 16, 32)], {"element_b": "fp8"}, "element_b is 'fp8'"),
        ([(1, 16, 32)], {"out": "fp64"}, "out is 'fp64'"),
        ([(1, 16, 32)], {"promotion_k": 32, "sfb_rows": 128}, "promotion_k=32, sfb_rows=128"),
    ],
)
def test_errors(sizes, options, message):
    for function in (select_kernel, rank):
        with pytest.raises(ValueError, match=message):
            function(sizes, **options)


@pytest.mark.parametrize("entry", [(128.0, 256, 512), (128, 256), 7, "128", None], ids=str)
def test_entries_are_three_ints(entry):
    with pytest.raises(TypeError, match=r"problem_sizes\[1\] is .*: it must be three ints, \(M, N, K\)"):
        select_kernel([(128, 256, 512), entry])


SM100_TYPES = ("e4m3", "e4m3", "bf16")


def on_blackwell(m, n, k, groups, *, split=True):
    return select_stacked(m, n, k, groups, "100a", *SM100_TYPES, split=split)


def test_none_stands_for_128_on_hopper():
    sizes = [(300, 768, 1024)] * 3
    assert select_kernel(sizes) is select_kernel(sizes, promotion_k=128, sfb_rows=128)
    assert select_kernel(sizes, sfb_rows=1) is select_kernel(sizes, promotion_k=128, sfb_rows=1)
    assert make_facts(None, None, "e4m3", "e4m3", "bf16") == FACTS


@pytest.mark.parametrize(
    "types", [*product(("e4m3", "e5m2"), ("e4m3", "e5m2"), ("bf16", "fp16", "fp32"))], ids="-".join
)
def test_blackwell_has_each_tile_for_all_types_and_kinds_of_groups(types):
    facts = make_facts(None, None, *types, "100a")
    assert tuple(facts.values()) == types
    fitting = {c for c in sm100_configs() if (c.element_a, c.element_b, c.out) == types}
    assert len(fitting) == len(SM100_TILES)
    ranked = {
        select_kernel([(500, 768, 4096)] * 8, "100a", **facts): rank([(500, 768, 4096)] * 8, "100a", **facts),
        select_stacked(4000, 768, 4096, 8, "100a", *types, split=True): rank_stacked(
            4000, 768, 4096, 8, "100a", facts, split=True
        ),
        select_k_groups(4096, 768, 4000, 8, "100a", *types): rank_k_groups(4096, 768, 4000, 8, "100a", facts),
    }
    for picked, candidates in ranked.items():
        assert picked == candidates[0].config
        assert {c.config for c in candidates} == fitting


@given(problems=st.lists(dimensions, min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_rank_for_blackwell(problems):
    candidates = rank(problems, "100a")
    times = [c.total_us for c in candidates]
    assert times == sorted(times)
    for c in candidates:
        assert c.total_us == max(c.waves_us, c.memory_us)
        assert c.stage_us == max(c.multiply_us, c.l2_us)
        assert 0 < c.efficiency <= 1
        assert all(getattr(c, term) >= 0 for term in TERMS)
    choice = choose(problems, "100a")
    assert (choice.config, choice.match, choice.tuned) == (candidates[0].config, None, False)
    assert choose(tuple(problems), "100a") is choice
    assert rank(problems, "100a") == candidates
    assert table.load("100a") == table.Table()


def test_blackwell_takes_large_tiles_of_pairs_for_large_products():
    for config in (
        select_kernel([(4096, 14336, 4096)] * 8, "100a"),
        on_blackwell(32768, 14336, 4096, 8),
        on_blackwell(4096, 14336, 4096, 8, split=False),
        select_k_groups(14336, 4096, 32768, 8, "100a", *SM100_TYPES),
    ):
        assert (config.tile_m, config.sms) == (256, 2)
        assert config.tile_n >= 192


def test_blackwell_takes_small_tiles_for_decode():
    for config in (
        select_kernel([(4, 4096, 7168)] * 8, "100a"),
        on_blackwell(32, 4096, 7168, 8),
        on_blackwell(4, 4096, 7168, 8, split=False),
    ):
        assert config.tile_m == 128
        assert config.tile_n <= 128


few_rows = st.tuples(
    st.integers(0, 64), st.integers(1, 1000).map(lambda n: 16 * n), st.integers(1, 500).map(lambda k: 32 * k)
)


@given(
    problems=st.lists(few_rows, min_size=1, max_size=40),
    groups=st.integers(1, 1024),
    out=st.sampled_from(["bf16", "fp32"]),
)
@settings(max_examples=200, deadline=None)
def test_pairs_are_not_picked_where_a_second_sm_would_have_no_rows(problems, groups, out):
    assert select_kernel(problems, "100a", out=out).sms == 1
    m, n, k = problems[0]
    for rows, split in ((m, False), (m * groups, True), (m, True)):
        assert select_stacked(rows, n, k, groups, "100a", "e4m3", "e4m3", out, split=split).sms == 1


def test_stores_of_blackwell_count_where_they_are_longer_than_the_next_loop():
    def tile_us(k):
        (candidate,) = (
            c
            for c in rank([(128 * 148, 128, k)], "100a")
            if (c.config.tile_m, c.config.tile_n, c.config.cluster_n) == (128, 128, 1)
        )
        assert candidate.waves == 1
        return candidate, candidate.waves_us - candidate.store_us

    short, us = tile_us(128)
    assert us == pytest.approx(short.store_us)
    long, us = tile_us(128 * 50)
    assert us == pytest.approx(50 * long.stage_us)


def test_blackwell_is_the_same_in_another_process():
    code = (
        "from mxfp8_cutlass.select import select_kernel;"
        "print(select_kernel([(100, 4096, 7168)] * 3 + [(0, 4096, 7168)], '100a').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == select_kernel([(100, 4096, 7168)] * 3 + [(0, 4096, 7168)], "100a").name
