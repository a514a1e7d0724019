"""The pinned lists: complete pins and nothing else, and the CUDA list is the CPU list with the other fbgemm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
PIN = re.compile(r'[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*(; python_version (<|>=) "3\.\d+")?')


def pins(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("name", ["cpu", "cuda", "dev"])
def test_every_line_is_a_pin_and_no_package_is_named_twice(name: str) -> None:
    assert all(PIN.fullmatch(line) for line in pins(name))
    names = [re.split("==|;", line.lower())[0].replace("_", "-") + line.partition(";")[2] for line in pins(name)]
    assert len(names) == len(set(names))


def test_the_lists_differ_in_fbgemm_alone() -> None:
    assert set(pins("cpu")) ^ set(pins("cuda")) == {"fbgemm-gpu-cpu==1.8.0", "fbgemm-gpu==1.8.0"}


def test_the_lists_do_not_overlap_with_the_tools() -> None:
    assert not set(pins("cpu")) & set(pins("dev"))
