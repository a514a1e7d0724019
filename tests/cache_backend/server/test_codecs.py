"""Rows and checksums as they travel, against numpy and a bit at a time."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from frames import Request, crc32c, decode_request, encode_request

from cache_backend import _table

CODECS = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}


def rows_on_the_wire(codec: str, rows: np.ndarray) -> bytes:
    """The rows' bytes out of a request that pushes them."""
    n, dim = rows.shape
    tables, numbers, none = np.zeros(n, np.int32), np.zeros(n, np.int64), np.empty(0, np.int64)
    frame = _table.encode_request(
        worker=0,
        session=0,
        sequence=1,
        generation=0,
        dim=dim,
        state_dim=0,
        push_codec=CODECS[codec],
        fetch_codec=0,
        push_tables=tables,
        push_keys=numbers,
        push_starts=numbers,
        push_clocks=numbers,
        deltas=rows,
        check_tables=tables[:0],
        check_keys=none,
        check_clocks=none,
        check_staleness=none,
        fetch_tables=tables[:0],
        fetch_keys=none,
    )
    size = int(np.frombuffer(frame[80:88], np.uint64)[0])
    return bytes(frame[96 + 4 * 16 : 96 + size])  # four blocks of equal numbers come first


def reference(codec: str, row: np.ndarray) -> bytes:
    if codec == "fp32":
        return row.tobytes()
    if codec == "fp16":
        return np.clip(row, np.float32(-65504), np.float32(65504)).astype(np.float16).tobytes()
    if codec == "bf16":
        bits = row.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    scale = np.float32(np.abs(row).max() / np.float32(127))
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    return scale.tobytes() + np.clip(np.rint(row * inverse), -127, 127).astype(np.int8).tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 300])
def test_rows_are_numpys_byte_by_byte(codec: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((50, dim)).astype(np.float32) * np.float32(10) ** rng.integers(-6, 6, (50, 1))
    rows = rows.astype(np.float32)
    rows[7] = 0.0
    rows[8] = np.arange(dim) - np.float32(dim) / 2 + np.float32(0.5)  # halves: ties go to the even one
    rows[9] = -rows[8]
    rows[10, 0] = 127.0
    rows[10, 1:] = (np.arange(dim - 1) % 255 - 127) / np.float32(2)
    expected = b"".join(reference(codec, row) for row in rows)
    assert rows_on_the_wire(codec, rows) == expected + bytes(-len(expected) % 8)


@pytest.mark.parametrize("codec", ["fp16", "int8"])
@pytest.mark.parametrize("place", [0, 5, 39])
def test_a_value_that_is_no_number_leaves_its_neighbours_alone(codec: str, place: int) -> None:
    row = np.linspace(-1, 1, 40, dtype=np.float32)[None]
    usual = rows_on_the_wire(codec, row)
    row[0, place] = np.nan
    # The largest magnitude, and with it an int8 row's scale, stays.
    assert sum(a != b for a, b in zip(rows_on_the_wire(codec, row), usual, strict=True)) <= 2 or place in (0, 39)


def bitwise_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# RFC 3720, appendix B.4.
VECTORS = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
}


@pytest.mark.parametrize(("data", "value"), VECTORS.items())
def test_checksum_of_known_bytes(data: bytes, value: int) -> None:
    assert _table.checksum(np.frombuffer(data, np.uint8)) == value == crc32c(data) == bitwise_crc32c(data)


@pytest.mark.parametrize(
    "length", [*range(70), 1023, 1024, 1025, 3071, 3072, 3073, 3080, 6143, 6144, 6149, 10_000, 20_011]
)
def test_checksum_of_any_length_from_any_place(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length + 16).astype(np.uint8)
    for start in range(9):
        part = data[start : start + length]
        assert _table.checksum(part) == crc32c(part.tobytes()), start
    if length <= 3080:
        assert crc32c(data[:length].tobytes()) == bitwise_crc32c(data[:length].tobytes())


@pytest.mark.parametrize("rows", [100, 1000])
def test_long_frames_pass_the_independent_decoder(rows: int) -> None:
    request = Request(
        4,
        0,
        sequence=1,
        pushes=[(0, i * i, i + 1, 1) for i in range(rows)],
        deltas=[[i / 8, -i / 4, 0.0, 1.0] for i in range(rows)],
        fetches=[(0, i) for i in range(rows)],
    )
    frame = encode_request(request)
    parsed = _table.parse_request(np.frombuffer(frame, np.uint8), 1 << 20)
    assert (parsed.pushes, parsed.fetches) == (rows, rows)
    assert decode_request(frame) == request
    garbled = bytearray(frame)
    for place in (12, 500, len(frame) // 2, len(frame) - 1):
        garbled[place] ^= 1
        with pytest.raises(_table.WireError):
            _table.parse_request(np.frombuffer(bytes(garbled), np.uint8), 1 << 20)
        garbled[place] ^= 1
    assert struct.unpack_from("<I", frame, 24) == (rows,)
