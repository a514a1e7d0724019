"""Bring-your-own Parquet: discovery, drift between files, Hive folders, options, splits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.errors import DataError
from datamodules.keys import MISSING_KEY, keys_to_uint64
from datamodules.parquet import ParquetDataModule
from tests.datamodules.modules import Write, column, module
from tests.datamodules.reference import fnv1a


def test_columns_are_found_by_their_types(write: Write) -> None:
    path = write(
        a=pa.table(
            {
                "label": pa.array([0, 1]),
                "f32": pa.array([0.5, 1], pa.float32()),
                "f64": pa.array([0.5, None]),
                "int": pa.array([1, 2], pa.int16()),
                "bool": pa.array([True, False]),
                "text": pa.array(["a", "b"]),
                "category": pa.array(["a", "b"]).dictionary_encode(),
                "ids": pa.array([[1], [2, 3]]),
                "words": pa.array([["x"], []], pa.list_(pa.string())),
                "scores": pa.array([[1.0], [2.0]]),
                "when": pa.array([0, 1], pa.timestamp("s")),
            }
        )
    )
    spec = module(path).spec
    assert spec.dense == ("f32", "f64")
    assert spec.sparse_names == ["int", "bool", "text", "category", "ids", "words"]
    assert [t.name for t in spec.tables] == spec.sparse_names
    assert all(t.num_embeddings is None for t in spec.tables)
    assert module(path, dense=["int"], sparse=["text"]).spec.dense == ("int",)
    assert module(path, dense=["int"]).spec.sparse_names == ["bool", "text", "category", "ids", "words"]
    assert module(path, dense=[]).spec.dense == ()
    batch = next(iter(module(path).train_dataloader()))
    assert batch.dense_features.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert batch.sparse_features["ids"].lengths().tolist() == [1, 2]
    assert batch.sparse_features["words"].values().tolist() == [fnv1a(b"x")]


def test_large_unsigned_ids_come_back(write: Write) -> None:
    ids = [12120467241726599441, 1, 2**63, 2**64 - 1]
    data = module(write(a=pa.table({"label": [0] * 4, "id": pa.array(ids, pa.uint64())})))
    assert keys_to_uint64(column(data, "id")).tolist() == ids


def test_files_with_other_types_of_one_column_unite(write: Write) -> None:
    """First file all null, then int32, int64, a dictionary, an empty value, and a file without the column."""
    path = write(
        a=pa.table({"label": [0, 1], "x": pa.nulls(2), "s": pa.nulls(2, pa.string())}),
        b=pa.table({"x": pa.array([1, 2], pa.int32()), "label": pa.array([0.0, 1.0]), "s": ["p", "q"]}),
        c=pa.table({"label": [True], "x": pa.array([2**40], pa.int64()), "s": pa.array(["p"]).dictionary_encode()}),
        d=pa.table({"label": [1], "x": pa.array([2]).dictionary_encode(), "late": [7], "list": [[1, 2]]}),
        e=pa.table({"label": [1], "s": pa.array([b"q"]), "list": pa.array([None], pa.large_list(pa.int8()))}),
    )
    data = module(path)
    p, q, none = fnv1a(b"p"), fnv1a(b"q"), MISSING_KEY
    assert data.spec.sparse_names == ["x", "s", "late", "list"]
    assert column(data, "x") == [none, none, 1, 2, 2**40, 2, none]
    assert column(data, "s") == [none, none, p, q, p, none, q]
    assert column(data, "late") == [none] * 5 + [7, none]
    assert column(data, "list") == [none] * 5 + [1, 2, none]
    labels = [v for batch in data.train_dataloader() for v in batch.labels.tolist()]
    assert labels == [0, 1, 0, 1, 1, 1, 1]


def test_dense_columns_unite_too(write: Write) -> None:
    path = write(
        a=pa.table({"label": [0], "d": pa.nulls(1), "k": [1]}),
        b=pa.table({"label": [0], "d": [3], "k": [1]}),
        c=pa.table({"label": [0], "d": [0.5], "k": [1]}),
        d=pa.table({"label": [0], "k": [1]}),
    )
    data = module(path)
    assert data.spec.dense == ("d",)
    assert next(iter(data.train_dataloader())).dense_features.tolist() == [[0], [3], [0.5]]


@pytest.mark.parametrize(
    ("one", "other", "types"),
    [
        (pa.array([1]), pa.array(["1"]), "string.*int64"),
        (pa.array([[1]]), pa.array([1]), "int64.*list"),
        (pa.array([[1]]), pa.array([["1"]]), "list.*list"),
        (pa.array([1]), pa.array([0], pa.timestamp("s")), "timestamp.*int64"),
    ],
)
def test_a_conflict_between_files_names_column_and_files(
    write: Write, one: pa.Array, other: pa.Array, types: str
) -> None:
    path = write(
        a=pa.table({"label": [0], "x": pa.nulls(1)}),
        b=pa.table({"label": [0], "x": one}),
        c=pa.table({"label": [0], "x": other}),
    )
    with pytest.raises(DataError, match=rf"'x'.*{types}") as caught:
        module(path)
    assert str(path / "b.parquet") in str(caught.value)
    assert str(path / "c.parquet") in str(caught.value)


def test_a_date_cannot_be_keys(write: Write) -> None:
    path = write(a={"label": [0], "x": pa.nulls(1)}, b={"label": [0], "x": pa.array([0], pa.date32())})
    with pytest.raises(DataError, match=r"'x' cannot be a sparse feature: it is date32.* in .*b\.parquet"):
        module(path, sparse=["x"])


def test_a_missing_label_is_an_error_that_names_the_file(write: Write) -> None:
    path = write(a={"label": [0], "x": [1]}, b={"x": [1]})
    with pytest.raises(DataError, match=r"b\.parquet has no label column 'label'"):
        module(path)
    with pytest.raises(DataError, match=r"no label column 'click'"):
        module(path, label="click")
    assert [b.batch_size for b in module_for_prediction(path).predict_dataloader()] == [2]


def module_for_prediction(path: Path) -> ParquetDataModule:
    made = ParquetDataModule(str(path))
    made.setup("predict")
    return made


def test_training_and_validation_files_must_agree(write: Write) -> None:
    path = write(a={"label": [0], "x": [1]}, b={"label": [0], "x": ["1"]})
    with pytest.raises(DataError, match=r"'x' is string in data\.val_path.*integer"):
        module(path / "a.parquet", val_path=str(path / "b.parquet"))
    lists = write(c={"label": [0], "x": pa.nulls(1)}, d={"label": [0], "x": [[1, 2]]})
    data = module(lists / "c.parquet", val_path=str(lists / "d.parquet"))
    assert next(iter(data.val_dataloader())).sparse_features["x"].values().tolist() == [1, 2]
    assert next(iter(data.train_dataloader())).sparse_features["x"].values().tolist() == [MISSING_KEY]


def test_hive_folders_give_columns_where_the_files_have_none(write: Write) -> None:
    path = write(
        **{
            "source_id=9319/day=3/a": {"label": [0], "source_id": ["s"]},
            "source_id=9319/day=11/b": {"label": [0], "source_id": ["t"]},
            "source_id=77/day=__HIVE_DEFAULT_PARTITION__/c": {"label": [0]},
            "source_id=a%2Fb/day=4/d": {"label": [0]},
        }
    )
    data = module(path)
    assert set(data.spec.sparse_names) == {"source_id", "day"}
    # Natural order of the folders: 77, 9319 (3 before 11), a%2Fb. The column in a file wins over its folder.
    assert column(data, "source_id") == [fnv1a(t) for t in (b"77", b"s", b"t", b"a/b")]
    assert column(data, "day") == [MISSING_KEY, 3, 11, 4]


def test_a_hive_folder_is_a_string_where_files_hold_strings(write: Write) -> None:
    path = write(**{"source_id=9319/a": {"label": [0]}, "b": {"label": [0], "source_id": ["9319"]}})
    assert column(module(path), "source_id") == [fnv1a(b"9319")] * 2


def test_hive_folders_of_integers_and_of_labels(write: Write) -> None:
    path = write(**{"label=0/x=5/a": {"d": [0.5]}, "label=1/x=-2/b": {"d": [1.5]}})
    data = module(path)
    assert column(data, "x") == [5, -2]
    batch = next(iter(data.train_dataloader()))
    assert batch.labels.tolist() == [0, 1]
    assert batch.dense_features.tolist() == [[0.5], [1.5]]


def test_hidden_files_and_other_files_are_no_data(write: Write) -> None:
    path = write(**{"a": {"label": [0], "x": [1]}, "_old/b": {"label": [0], "x": [2]}, ".c": {"label": [0], "x": [3]}})
    (path / "_SUCCESS").touch()
    (path / "notes.txt").write_text("hello")
    assert column(module(path), "x") == [1]


def test_empty_files_and_files_of_other_column_order(write: Write) -> None:
    path = write(
        a=pa.table({"label": pa.array([], pa.int64()), "x": pa.array([], pa.int64())}),
        b={"x": [1], "label": [1]},
        c={"label": [0], "x": [2]},
    )
    assert column(module(path), "x") == [1, 2]


def test_tables_sizes_pooling_and_weights(write: Write) -> None:
    path = write(
        a={
            "label": [0, 1],
            "user": [3, None],
            "friends": [[1, 2], None],
            "tags": [["x"], ["y", "z"]],
            "w": [[0.5], [1.0, 2.0]],
        }
    )
    options = {
        "tables": {"friends": "user"},
        "sizes": {"user": 4},
        "pooling": {"user": "mean"},
        "weights": {"tags": "w"},
    }
    data = module(path, **options)
    spec = data.spec
    assert [(f.name, f.table, f.weight) for f in spec.sparse] == [
        ("user", "user", None),
        ("friends", "user", None),
        ("tags", "tags", "w"),
    ]
    assert [(t.name, t.num_embeddings, t.pooling) for t in spec.tables] == [("user", 5, "mean"), ("tags", None, "sum")]
    assert spec.is_weighted
    features = next(iter(data.train_dataloader())).sparse_features
    assert features["user"].values().tolist() == [3, 4]
    assert features["friends"].values().tolist() == [1, 2, 4]
    assert features["tags"].weights().tolist() == [0.5, 1.0, 2.0]
    assert features["friends"].weights().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse": ["y"]}, r"data\.sparse names y; .* has: label, x, z"),
        ({"dense": ["y"]}, r"data\.dense names y"),
        ({"tables": {"y": "t"}}, r"data\.tables names y; the sparse columns are: x, z"),
        ({"sizes": {"y": 3}}, r"data\.sizes names y; the tables are: x, z"),
        ({"sizes": {"x": 0}}, r"data\.sizes gives table 'x' 0 keys"),
        ({"pooling": {"y": "sum"}}, r"data\.pooling names y"),
        ({"weights": {"x": "y"}}, r"data\.weights names y"),
        ({"batch_size": 0}, r"data\.batch_size=0; expected 1 or more"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, r"sum is below 1"),
        ({"val_fraction": -0.1}, r"0 or more"),
        ({"test_fraction": 0.9, "split": "order"}, r"the train split is empty.*has 2 rows"),
    ],
)
def test_wrong_options_are_named(write: Write, options: dict[str, Any], message: str) -> None:
    path = write(a={"label": [0, 1], "x": [1, 2], "z": ["a", "b"]})
    with pytest.raises(DataError, match=message):
        module(path, **options)


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path='.*nowhere' does not exist"):
        module(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no Parquet file"):
        module(tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read as Parquet"):
        module(tmp_path)


def test_splits_by_order_by_hash_and_by_files(id_files: Callable[..., Path]) -> None:
    path = id_files([700, 300], row_group=128)

    def ids(loader: Any) -> list[int]:
        return [i for batch in loader for i in batch.sparse_features.values().tolist()]

    def splits(**options: Any) -> tuple[list[int], list[int], list[int]]:
        data = module(path, batch_size=64, **options)
        assert data.has_val == (options.get("val_path") is not None or options.get("val_fraction", 0) > 0)
        assert data.has_test == (options.get("test_path") is not None or options.get("test_fraction", 0) > 0)
        return ids(data.train_dataloader()), ids(data.val_dataloader()), ids(data.test_dataloader())

    order = {"split": "order", "val_fraction": 0.2, "test_fraction": 0.1}
    assert splits(**order) == (list(range(700)), list(range(700, 900)), list(range(900, 1000)))
    assert splits() == (list(range(1000)), [], [])

    train, val, test = splits(val_fraction=0.2, test_fraction=0.1)
    assert sorted(train + val + test) == list(range(1000))
    assert len(val) == pytest.approx(200, abs=40)
    assert len(test) == pytest.approx(100, abs=30)
    assert splits(val_fraction=0.2, test_fraction=0.1) == (train, val, test)
    assert splits(val_fraction=0.2, test_fraction=0.1, seed=1)[2] != test
    assert splits(val_fraction=0.1, test_fraction=0.1)[2] == test  # the test rows stay what they are

    one = str(path / "part-001.parquet")
    by_file = splits(val_fraction=0.5, test_fraction=0.1, test_path=one, split="order")
    assert by_file == (list(range(500)), list(range(500, 1000)), list(range(700, 1000)))


def test_expected_rows_are_the_span_of_integers(write: Write) -> None:
    path = write(
        a={"label": [0] * 3, "x": [5, 7, 6], "big": [1, 10**12, 5], "s": ["a", "b", "b"]},
        b={"label": [0] * 2, "x": [8, 5], "big": [1, 1], "s": ["a", "c"]},
    )
    assert {t.name: t.expected_rows for t in module(path).spec.tables} == {"x": 4, "big": 5, "s": 5}


def test_frappe_is_read_as_it_is(shared_data: Path) -> None:
    frappe = shared_data / "frappe"
    data = ParquetDataModule(str(frappe / "train.parquet"), test_path=str(frappe / "test.parquet"), batch_size=4096)
    data.setup("fit")
    assert data.spec.dense == ()
    assert len(data.spec.sparse) == 10
    rows = {name: sum(b.batch_size for b in loader) for name, loader in (("test", data.test_dataloader()),)}
    train, val = (sum(b.batch_size for b in loader) for loader in (data.train_dataloader(), data.val_dataloader()))
    assert rows["test"] == 28_860
    assert train + val == 57_722
    assert val == pytest.approx(5_772, abs=300)
    table = pq.read_table(frappe / "test.parquet")
    read = np.concatenate([b.sparse_features["item"].values().numpy() for b in data.test_dataloader()])
    assert (read == table["item"].to_numpy()).all()
