"""Predictions on new rows: other files than those that were trained on, as a program would hand them in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from hetrec.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = (
    "model=deepfm",
    "data=parquet",
    "model.mlp_sizes=[8]",
    "model.embedding_dim=4",
    "trainer.enable_progress_bar=false",
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(count: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    price, age = random.normal(size=count), random.normal(size=count) * 5
    user, item = random.integers(0, 20, count), random.integers(0, 30, count)
    label = (random.random(count) < 1 / (1 + np.exp(-price - (user % 2)))).astype(int)
    return pa.table({"label": label, "price": price, "age": age, "user": user, "item": item.astype(str)})


def predict(path: str, out: str, *words: str) -> int:
    return main(CONFIGS, ["predict", *SMALL, f"data.path={path}", f"out={out}", "ckpt_path=last", *words])


def test_rows_without_labels_in_another_order_of_columns(capfd: pytest.CaptureFixture[str]) -> None:
    """The order of columns is that of training, whatever the file's; further columns are not looked at; ids are written
    beside the scores, in the order of the rows; ids never seen have a score; two files, one of them with row groups."""
    pq.write_table(rows(400, 0), "train.parquet")
    assert main(CONFIGS, ["fit", *SMALL, "data.path=train.parquet", "data.batch_size=32", "optimizer.lr=0.1"]) == 0
    new = rows(90, 1)
    pq.write_table(new, "same.parquet")
    assert predict("same.parquet", "same.parquet.scores.parquet") == 0
    expected = pq.read_table("same.parquet.scores.parquet")["probability"].to_numpy()
    assert expected.std() > 0.01

    request = pa.array([f"r{i}" for i in range(90)])
    turned = new.select(["item", "age", "user", "price"]).append_column("request", request)
    turned = turned.append_column("another", pa.array([0.5] * 90))
    Path("new").mkdir()
    pq.write_table(turned[:50], "new/a.parquet", row_group_size=20)
    pq.write_table(turned[50:], "new/b.parquet")
    assert predict("new", "deep/folder/scores.csv", "id_column=request", "data.batch_size=16") == 0
    scores = arrow_csv.read_csv("deep/folder/scores.csv")
    assert scores.column_names == ["request", "probability"]
    assert scores["request"].to_pylist() == request.to_pylist()
    np.testing.assert_allclose(scores["probability"].to_numpy(), expected, rtol=0, atol=1e-6)

    digits = turned.set_column(0, "item", pc.cast(turned["item"], pa.int64()))
    pq.write_table(digits, "digits.parquet")
    assert predict("digits.parquet", "x.csv") in (1, 2)
    message = "column 'item' is integer in data.path='digits.parquet', and was string where the checkpoint was trained"
    assert message in " ".join(capfd.readouterr().err.split())

    unseen = new.set_column(3, "user", pa.array([10**12] * 90)).set_column(4, "item", pa.array(["new"] * 90))
    pq.write_table(unseen.drop_columns("label"), "unseen.parquet")
    assert predict("unseen.parquet", "unseen.csv") == 0
    probability = arrow_csv.read_csv("unseen.csv")["probability"].to_numpy()
    assert ((probability > 0.02) & (probability < 0.98)).all()

    for words, message in (
        (("same.parquet", "scores.txt"), "out=scores.txt: predictions are written as .parquet or .csv"),
        (
            ("same.parquet", "x.csv", "id_column=request"),
            "id_column=request: data.path='same.parquet' has: label, price",
        ),
        (("train.csv", "x.csv"), "data.path='train.csv' does not exist"),
    ):
        capfd.readouterr()
        assert predict(*words) in (1, 2)
        error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
        assert len(error) == 1
        assert message in error[0]
    assert not Path("x.csv").exists()
    pq.write_table(turned.drop_columns("age"), "lacks.parquet")
    assert predict("lacks.parquet", "x.csv") in (1, 2)
    assert "data.dense names age; 'lacks.parquet' has: item, user, price" in capfd.readouterr().err.replace("\n", " ")
