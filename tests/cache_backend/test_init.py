"""Initial rows against a Philox4x32-10 written from its paper (Salmon et al., SC 2011), and its published vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_backend import LocalStore, TableSchema, ops
from cache_backend.store import Check, ExchangeRequest, Fetch, Push

WORD = (1 << 32) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def expected_row(seed: int, key: int, dim: int, low: float, high: float) -> np.ndarray:
    row = np.empty(dim)
    bits = key % (1 << 64)
    for d in range(dim):
        group, word, lane = d // 32, d % 32 // 8, d % 8
        words = philox((bits & WORD, bits >> 32, group * 8 + lane, 0), (seed & WORD, seed >> 32))
        row[d] = float(np.float32(low)) + (words[word] >> 8) / (1 << 24) * float(np.float32(high) - np.float32(low))
    return row.astype(np.float32)


def made(seed: int, keys: list[int], dim: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    rows = torch.zeros(len(keys), dim + 1)
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    ops.init_rows(
        rows,
        torch.ones(len(keys), dtype=torch.uint8),
        torch.tensor(keys),
        torch.zeros(len(keys), dtype=torch.int32),
        torch.tensor([signed]),
        torch.tensor([[low, high, 0.25]]),
        dim,
    )
    assert (rows[:, dim] == 0.25).all()
    return rows[:, :dim].numpy()


def test_reference_matches_published_vectors() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (WORD,) * 4
    assert philox(ones, ones[:2]) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("dim", [1, 4, 7, 16, 17, 32, 33, 128])
def test_rows_follow_the_reference(dim: int) -> None:
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345]
    for seed in (0, 42, 2**64 - 1):
        expected = np.stack([expected_row(seed, key, dim, -0.05, 0.05) for key in keys])
        np.testing.assert_array_equal(made(seed, keys, dim, -0.05, 0.05), expected)


def test_values_fill_the_range_evenly() -> None:
    values = made(7, list(range(20_000)), 16, low=-0.5, high=1.5).ravel()
    assert values.min() >= -0.5
    assert values.max() < 1.5
    counts, _ = np.histogram(values, bins=20, range=(-0.5, 1.5))
    assert np.abs(counts / counts.mean() - 1).max() < 0.03  # 16,000 a bin: 4 standard deviations


def test_rank_and_server_make_the_same_row() -> None:
    """A row's first push lands on the initial row that the server makes for itself; the sum must be the rank's."""
    store = LocalStore()
    schema = TableSchema(
        "t", dim=17, optimizer="rowwise_adagrad", seed=99, init_low=-0.1, init_high=0.1, init_state=0.5
    )
    (table,) = store.open([schema])
    keys = np.array([5, -(2**63), 2**40], np.int64)
    tables = np.full(3, table, np.int32)
    zero = np.zeros(3, np.int64)
    push = Push(tables, keys, zero, zero, np.zeros((3, 18), np.float32))
    store.exchange(ExchangeRequest(17, 1, push, Check(), Fetch(tables[:0], keys[:0])))
    rows, fresh = store.read(17, 1, Fetch(tables, keys))
    assert not fresh.any()
    np.testing.assert_array_equal(rows[:, :17], made(99, keys.tolist(), 17, -0.1, 0.1))
    assert (rows[:, 17] == 0.5).all()
