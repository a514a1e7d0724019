"""How categorical values become int64 keys, without a vocabulary.

* Integers are their own keys. Unsigned 64-bit ids keep their bits (two's complement), so an id of 2^63 or more becomes
  a negative key; :func:`keys_to_uint64` undoes it.
* Strings and bytes are hashed: FNV-1a, 64 bit, over the UTF-8 bytes, read as a signed integer.
* Missing is a key of its own: ``MISSING_KEY`` in a table without a size, one row past the last in a table with a size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["MISSING_KEY", "hash_bytes", "keys_to_uint64", "mix64", "uint64_to_keys"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

# Not -1, 0 or an end of the int64 range: people do use those as ids. (Bits of the square root of 2, negated.)
MISSING_KEY = -0x6A09E667F3BCC909

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_FEW = 16


def uint64_to_keys(ids: npt.ArrayLike) -> Int64Array:
    """Unsigned ids as int64 keys with the same 64 bits: ``id`` below 2^63, ``id - 2^64`` from there on."""
    return np.asarray(ids, dtype=np.uint64).view(np.int64)


def keys_to_uint64(keys: npt.ArrayLike) -> UInt64Array:
    """The unsigned ids that :func:`uint64_to_keys` mapped to ``keys``."""
    return np.asarray(keys, dtype=np.int64).view(np.uint64)


def hash_bytes(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.integer]) -> Int64Array:
    """FNV-1a hashes of byte strings stored back to back.

    Args:
        data: uint8, the bytes of all strings.
        offsets: (n + 1,), string i is ``data[offsets[i]:offsets[i + 1]]``.

    Returns:
        int64 (n,). Never ``MISSING_KEY``: that value becomes ``MISSING_KEY + 1``.
    """
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    hashes = np.full(len(starts), _FNV_OFFSET, dtype=np.uint64)
    # One pass per byte position over the strings that are long enough, so the work is the number of bytes.
    active = np.flatnonzero(lengths > 0)
    position = 0
    while len(active) > _FEW:
        byte = data[starts[active] + position].astype(np.uint64)
        hashes[active] = (hashes[active] ^ byte) * _FNV_PRIME
        position += 1
        active = active[lengths[active] > position]
    prime = int(_FNV_PRIME)
    for i in active.tolist():  # a few long ones: a pass per byte would cost them more than plain Python does
        value = int(hashes[i])
        for octet in data[starts[i] + position : starts[i] + lengths[i]].tobytes():
            value = (value ^ octet) * prime % 2**64
        hashes[i] = value
    keys = hashes.view(np.int64)
    keys[keys == MISSING_KEY] += 1
    return keys


def mix64(values: UInt64Array) -> UInt64Array:
    """SplitMix64's output function: a bijection of 64-bit integers whose output looks random."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
