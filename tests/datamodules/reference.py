"""Plain Python versions of what the data modules compute."""

from __future__ import annotations


def fnv1a(text: bytes) -> int:
    """FNV-1a as its authors give it, as a signed number."""
    value = 0xCBF29CE484222325
    for byte in text:
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value - 2**64 if value >= 2**63 else value


def criteo_row(line: str, labelled: bool = True) -> list[int | None]:
    """Label (if there is one), integers (None where missing) and keys (-1 where missing) of a line of Criteo's text."""
    fields = line.split("\t")
    fields += [""] * ((40 if labelled else 39) - len(fields))
    integers = 14 if labelled else 13
    numbers = [int(f) if f else None for f in fields[:integers]]
    return numbers + [int(f, 16) if f else -1 for f in fields[integers:]]
