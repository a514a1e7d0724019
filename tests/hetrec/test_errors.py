"""Which errors are the user's, to be said in one line, and which are bugs, to be shown with their traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from cache_backend import CacheConfig
from datamodules.synthetic import SyntheticDataModule
from hetrec.data import FeatureSpec, SparseFeature, TableSpec
from hetrec.errors import UserError, is_users_mistake, one_line, users_mistake

REPOSITORY = Path(__file__).resolve().parents[2]


def caught(action: Callable[..., object], *args: object, **kwargs: object) -> Exception:
    try:
        action(*args, **kwargs)
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def test_what_our_own_raise_statements_say_to_callers_is_for_the_user() -> None:
    spec = {"dense": (), "sparse": (SparseFeature("a", "b"),), "tables": (TableSpec("c"),), "label": "y"}
    assert is_users_mistake(caught(FeatureSpec, **spec))
    assert is_users_mistake(caught(CacheConfig, rows=0))
    assert is_users_mistake(UserError("x"))


def test_what_lightning_says_about_its_settings_is_for_the_user() -> None:
    error = caught(Trainer, enable_checkpointing=False, enable_progress_bar=False, fast_dev_run=-1)
    assert isinstance(error, MisconfigurationException)
    assert is_users_mistake(error)


def test_what_others_raise_below_us_is_a_bug() -> None:
    assert not is_users_mistake(caught(int, "x"))
    assert not is_users_mistake(caught(np.zeros(3).reshape, 2))


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("raise ValueError('x')", True),
        ("raise IndexError('x')", True),
        ("raise FileNotFoundError('x')", True),
        ("raise RuntimeError('x')", False),
        ("a, b = [1]", False),
        ("[][0]", False),
        ("open('')", False),
    ],
)
def test_in_a_line_of_ours_only_a_raise_statement_speaks_to_the_user(line: str, ours: bool) -> None:
    space: dict[str, Callable[[], object]] = {}
    exec(compile(f"def fail():\n    {line}\n", str(REPOSITORY / "hetrec" / "some_file.py"), "exec"), space)
    assert is_users_mistake(caught(space["fail"])) is ours


def test_an_assertion_of_ours_is_a_bug() -> None:
    assert not is_users_mistake(AssertionError("an invariant"))


def test_a_message_of_several_lines_becomes_one() -> None:
    assert one_line(ValueError("a\n  b\n\nc")) == "a b c"


def test_a_mistake_that_a_library_wrapped_in_an_error_of_its_own_is_found() -> None:
    mistake = caught(SyntheticDataModule, batch_size=0)
    wrapped = ValueError("Does not validate against any of the Union subtypes")
    wrapped.__cause__ = mistake
    assert users_mistake(mistake) is mistake
    assert users_mistake(wrapped) is mistake
    assert users_mistake(caught(np.zeros, -1)) is None
