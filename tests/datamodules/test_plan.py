"""The division of rows over splits, ranks and batches: arithmetic alone, no files."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.plan import EpochPlan, Rows, make_units


def positions(plan: EpochPlan, rows: Rows, epoch: int) -> list[list[int]]:
    """The global positions of the rows of every batch of a rank."""
    batches = []
    for window in range(plan.windows):
        found: list[int] = []
        for piece in plan.window_slices(epoch, window):
            kept = np.arange(piece.unit.position, piece.unit.position + piece.unit.rows)[
                rows.mask(piece.unit.position, piece.unit.rows)
            ]
            found += kept[piece.start : piece.stop].tolist()
        order = plan.window_permutation(epoch, window)
        if order is not None:
            found = [found[i] for i in order]
        bounds = plan.window_bounds(window)
        assert bounds[-1] == len(found)
        batches += [found[low:high] for low, high in pairwise(bounds)]
    return batches


files = st.lists(st.lists(st.integers(0, 30), max_size=4), min_size=1, max_size=6)


@settings(max_examples=300)
@given(files, st.integers(1, 5), st.integers(1, 12), st.integers(1, 60), st.booleans(), st.integers(0, 3), st.data())
def test_every_row_once_and_as_many_steps_on_every_rank(
    groups: list[list[int]], world: int, batch: int, window: int, shuffle: bool, epoch: int, data: st.DataObject
) -> None:
    total = sum(map(sum, groups))
    start, stop = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    buckets = data.draw(st.sampled_from([None, (0.2, 0.7)]))
    rows = Rows(start, stop, buckets, seed=5)
    units = tuple(make_units(groups, rows))
    ranks = [positions(EpochPlan(units, batch, window, shuffle, 1, rank, world), rows, epoch) for rank in range(world)]
    wanted = np.arange(total)[rows.mask(0, total)].tolist()

    read = [p for batches in ranks for b in batches for p in b]
    assert sorted(read) == wanted
    assert read == wanted or shuffle
    assert len({len(batches) for batches in ranks}) == 1
    counts = [sum(map(len, batches)) for batches in ranks]
    assert max(counts) - min(counts) <= 1
    for batches, count in zip(ranks, counts, strict=True):
        assert all(len(b) <= batch for b in batches)
        assert all(batches) or count < len(batches)  # an empty batch only where there are fewer rows than steps
        assert all(len(b) == batch for b in batches[:-2])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_uneven_files_on_several_ranks(world: int) -> None:
    """Files of 9, 10, 11 and 12 rows, and ranks that a division by whole files would leave without one."""
    for sizes in ([9, 10, 11, 12], [42], [1]):
        rows = Rows(0, sum(sizes))
        units = tuple(make_units([[s] for s in sizes], rows))
        ranks = [positions(EpochPlan(units, 4, 8, True, 0, rank, world), rows, 0) for rank in range(world)]
        assert Counter(p for batches in ranks for b in batches for p in b) == Counter(range(sum(sizes)))
        assert {len(batches) for batches in ranks} == {ceil(ceil(sum(sizes) / world) / 4)}


def test_the_last_step_has_a_row_on_every_rank_that_can_spare_one() -> None:
    rows = Rows(0, 9)
    units = tuple(make_units([[9]], rows))
    sizes = [[len(b) for b in positions(EpochPlan(units, 4, 8, False, 0, rank, 2), rows, 0)] for rank in range(2)]
    assert sizes == [[3, 1], [4, 1]]


def test_an_epoch_is_a_new_order_that_seed_and_epoch_decide() -> None:
    rows = Rows(0, 300)
    units = tuple(make_units([[100] * 3], rows))
    orders = {
        (seed, epoch): positions(EpochPlan(units, 10, 50, True, seed, 0, 1), rows, epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({str(order) for order in orders.values()}) == 4
    assert positions(EpochPlan(units, 10, 50, True, 1, 0, 1), rows, 1) == orders[1, 1]


def test_units_are_shuffled_across_files() -> None:
    rows = Rows(0, 80_000)
    units = tuple(make_units([[8192] * 5, [8192] * 4 + [6272]], rows))
    plan = EpochPlan(units, 100, 10_000, True, 0, 0, 1)
    files = [p.unit.file for w in range(plan.windows) for p in plan.window_slices(0, w)]
    assert files != sorted(files)
    assert files != sorted(files, reverse=True)


def test_small_row_groups_are_joined_and_large_ones_are_not() -> None:
    units = make_units([[10] * 5000, [100_000, 5, 5]], Rows(0, 150_010))
    assert len(units) <= 50_000 // 8000 + 3
    assert sum(u.kept for u in units) == 150_010
    assert [(u.groups, u.rows) for u in units[-2:]] == [(1, 100_000), (2, 10)]


def test_hash_splits_are_apart_complete_and_near_their_share() -> None:
    total = 50_000
    masks = [
        np.asarray(Rows(0, total, buckets, seed=3).mask(0, total)) for buckets in ((0.1, 0.8), (0.0, 0.1), (0.8, 1.0))
    ]
    assert (sum(m.astype(int) for m in masks) == 1).all()
    assert [round(float(m.mean()), 2) for m in masks] == [0.7, 0.1, 0.2]
    other_seed = np.asarray(Rows(0, total, (0.0, 0.1), seed=4).mask(0, total))
    assert 0.15 < float((masks[1] != other_seed).mean()) < 0.21  # independent: 2 * 0.1 * 0.9
    # The position counts, not where a row group begins.
    assert (np.asarray(Rows(0, total, (0.1, 0.8), seed=3).mask(777, 100)) == masks[0][777:877]).all()


def test_counting_a_hash_split_agrees_with_its_mask_over_more_than_one_chunk() -> None:
    rows = Rows(10, 2_500_000, (0.25, 0.5), seed=1)
    assert rows.count(5, 2_400_000) == int(np.count_nonzero(np.asarray(rows.mask(5, 2_400_000))))
