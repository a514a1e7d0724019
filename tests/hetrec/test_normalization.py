"""Raw dense columns: statistics of the training rows, their place in the checkpoint, and models that stay finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint

from datamodules.errors import DataError
from datamodules.parquet import ParquetDataModule
from hetrec.ctr_task import CTRTask
from hetrec.dense_normalizer import LIMIT, DenseNormalizer
from hetrec.dense_statistics import DenseStatistics
from models.dcn import DCN
from models.deepfm import DeepFM
from models.wdl import WDL
from tests.models.ctr import make_trainer

NAN, INF = math.nan, math.inf


def write(folder: Path, columns: dict[str, Any], labels: Any = None) -> Path:
    rows = len(next(iter(columns.values())))
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, rows) if labels is None else labels
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"label": labels, "user": generator.integers(0, 20, rows), **columns}), path)
    return path


def small(kind: type[CTRTask], data: ParquetDataModule) -> CTRTask:
    seed_everything(0, verbose=False)
    return kind(data.spec, embedding_dim=4, mlp_sizes=(16, 16))  # type: ignore[call-arg]


def test_merged_statistics_are_numpys() -> None:
    generator = np.random.default_rng(0)
    values = np.column_stack(
        [
            1e12 + generator.normal(size=1000),
            1e-9 * generator.lognormal(sigma=2, size=1000),
            generator.integers(-5, 5, 1000).astype(float),
            np.full(1000, 0.1),
            np.full(1000, NAN),
        ]
    )
    values[::7, :3] = NAN
    values[3::50, :3] = INF
    values[4::50, :3] = -INF
    merged = DenseStatistics.of(values[:0])
    for start, stop in ((0, 1), (1, 300), (300, 300), (300, 1000)):
        merged = merged.merge(DenseStatistics.of(values[start:stop]))
    assert merged.rows == 1000
    assert merged.missing.tolist() == np.isnan(values).sum(0).tolist()
    assert merged.infinite.tolist() == np.isinf(values).sum(0).tolist()
    for i in range(4):
        held = values[np.isfinite(values[:, i]), i].astype(np.longdouble)
        assert (merged.least[i], merged.most[i]) == (held.min(), held.max())
        for row, x in enumerate((held, np.sign(held) * np.log1p(np.abs(held)))):
            assert merged.mean[row, i] == pytest.approx(float(x.mean()), rel=1e-13)
            if i != 3 and not (i == 0 and row == 1):  # the logarithms of 1e12 + noise differ in their last digits only
                assert merged.std[row, i] == pytest.approx(float(x.std()), rel=1e-6)
    assert merged.std[:, 3:].tolist() == [[0, 0], [0, 0]]
    assert merged.finite[4] == 0


def test_normalised_values_are_the_formulas() -> None:
    generator = np.random.default_rng(1)
    values = np.column_stack(
        [generator.normal(1e12, 3, 5000), generator.lognormal(sigma=3, size=5000), *generator.normal(2, 4, (3, 5000))]
    )
    values[7, 2] = NAN
    normalizer = DenseNormalizer(("auto", "auto", "standard", "log", "none"))
    statistics = DenseStatistics.of(values)
    normalizer.fit(statistics)
    found = normalizer(torch.from_numpy(values)).numpy()
    logs = np.sign(values) * np.log1p(np.abs(values))
    for i, x in enumerate((values[:, 0], logs[:, 1], values[:, 2], logs[:, 3])):
        expected = (x - np.nanmean(x)) / np.nanstd(x)
        np.testing.assert_allclose(found[:, i], np.nan_to_num(np.clip(expected, -5, 5)), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[:, 4], values[:, 4], rtol=1e-6)
    assert found.dtype == np.float32
    beyond = torch.tensor([[1e300, -1e300, -1.7e308, NAN, 1e39], [INF, -INF, 5e-324, 0, NAN]], dtype=torch.float64)
    z = normalizer(beyond)
    assert z.isfinite().all()
    assert z[:, :3].tolist() == [[LIMIT, -LIMIT, -LIMIT], [0, 0, pytest.approx(-0.5, abs=0.05)]]
    report = normalizer.report(["time", "price", "age", "named", "raw"], statistics)
    assert report == [
        "dense columns standardised: time, age",
        "dense columns standardised after a signed log, for their long tails or as named: price, named",
        "dense columns left as they are: raw",
        "dense values missing, of 5,000 training rows: age (1)",
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_statistics_are_of_the_training_rows_alone_and_travel_in_the_checkpoint(tmp_path: Path, workers: int) -> None:
    x = np.concatenate([np.random.default_rng(2).normal(5, 2, 160), np.full(20, 1e6), np.full(20, -1e9)])
    x[0] = NAN
    path = write(tmp_path, {"x": x})
    options: dict[str, Any] = {"split": "order", "batch_size": 32, "sparse": ["user"], "num_workers": workers}
    data = ParquetDataModule(str(path), **options)
    model = small(WDL, data)
    trainer = make_trainer(
        tmp_path, callbacks=[ModelCheckpoint(tmp_path, filename="end")], enable_checkpointing=True, max_epochs=1
    )
    trainer.fit(model, data)
    assert model.normalizer is not None
    train = x[1:160]
    assert model.normalizer.mean_N.tolist() == pytest.approx([train.mean()])
    assert model.normalizer.scale_N.tolist() == pytest.approx([1 / train.std()])
    assert trainer.test(model, data, verbose=False)[0]["test_logloss"] < 2

    # Other rows have other statistics: the checkpoint's win, in prediction and in a run that goes on.
    other = ParquetDataModule(str(write(tmp_path, {"x": x[:160] * 1000})), **options)
    for stage in ("predict", "fit"):
        again = small(WDL, other)
        run = make_trainer(tmp_path, max_epochs=1)
        getattr(run, stage)(again, datamodule=other, ckpt_path=tmp_path / "end.ckpt", weights_only=False)
        assert again.normalizer is not None
        assert again.normalizer.mean_N.tolist() == pytest.approx([train.mean()])


def test_models_learn_from_large_raw_values_beside_small_ones(tmp_path: Path) -> None:
    """Values to 17,668 beside 0.0 to 3.0, nulls among them: without normalisation DCN explodes."""
    generator = np.random.default_rng(3)
    rows = 4000
    columns: dict[str, Any] = {
        "large": generator.integers(0, 17_669, rows).astype(float),
        "small": generator.integers(0, 4, rows).astype(float),
        "tail": generator.lognormal(3, 2, rows),
    }
    click = generator.random(rows) < 1 / (1 + np.exp(-2 * (columns["small"] - 1.5) - columns["large"] / 8834 + 1))
    for values in columns.values():
        values[generator.random(rows) < 0.1] = NAN
    data = ParquetDataModule(str(write(tmp_path, columns, click.astype(int))), batch_size=128, sparse=["user"])
    model = small(DCN, data)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(model, data)
    figures = trainer.test(model, data, verbose=False)[0]
    assert figures["test_auc"] > 0.8
    assert figures["test_logloss"] < 0.55

    raw = ParquetDataModule(data.path, batch_size=128, sparse=["user"], normalize="none")
    exploded = small(DCN, raw)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(exploded, raw)
    assert not trainer.test(exploded, raw, verbose=False)[0]["test_logloss"] < 1


SHAPES = {
    "normal": lambda generator: generator.normal(0, 1, 200),
    "shifted": lambda generator: generator.normal(1e3, 1, 200),
    "tail": lambda generator: generator.lognormal(0, 4, 200),
    "constant": lambda generator: np.ones(200),
    "outlier": lambda generator: np.append(np.zeros(199), 1e6),
    "counts": lambda generator: generator.zipf(1.5, 200).astype(float),
    "flags": lambda generator: (generator.random(200) < 0.01).astype(float),
}
COLUMNS = st.tuples(
    st.sampled_from(list(SHAPES)),
    st.sampled_from([-1, 1]),
    st.sampled_from([-300, -40, -9, -3, 0, 6, 12, 60, 300]),  # the power of ten
    st.sampled_from([0, 0.3, 1]),  # the share of missing and infinite values
)


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(drawn=st.lists(COLUMNS, min_size=3, max_size=6), seed=st.integers(0, 2**32))
def test_no_table_makes_a_model_explode(
    drawn: list[tuple[str, int, int, float]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    generator = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    for i, (shape, sign, power, share) in enumerate(drawn):
        x = SHAPES[shape](generator)
        with np.errstate(over="ignore"):
            x = sign * x * 10.0**power
        columns[f"x{i}"] = np.where(generator.random(200) < share, generator.choice([NAN, INF, -INF], 200), x)
    folder = tmp_path_factory.mktemp("table")
    path = write(folder, columns)
    for kind in (WDL, DeepFM, DCN):
        data = ParquetDataModule(str(path), batch_size=32, sparse=["user"])
        model = small(kind, data)
        trainer = make_trainer(folder)
        trainer.fit(model, data)
        assert all(p.isfinite().all() for p in model.parameters())
        assert trainer.test(model, data, verbose=False)[0]["test_logloss"] < 2


def test_options_of_normalisation(tmp_path: Path) -> None:
    path = str(write(tmp_path, {"a": np.array([1.5, NAN, INF]), "b": np.array([0.5, 1, 2])}))
    fractions = {"val_fraction": 0.0, "test_fraction": 0.0, "shuffle": False, "sparse": []}

    def batch(**options: Any) -> list[list[float]]:
        data = ParquetDataModule(path, **fractions, **options)
        data.setup("fit")
        dense: list[list[float]] = next(iter(data.train_dataloader())).dense_features.tolist()
        return dense

    np.testing.assert_equal(batch(), [[1.5, 0.5], [NAN, 1], [INF, 2]])
    assert ParquetDataModule(path, normalize={"b": "log"}).spec.normalize == ("auto", "log")
    assert ParquetDataModule(path, normalize={"b": "none"}).spec.normalize == ("auto", "none")
    assert ParquetDataModule(path, normalize="standard").spec.normalize == ("standard", "standard")
    assert ParquetDataModule(path, normalize="none").spec.normalize == ()
    with pytest.raises(DataError, match="holds an infinite value"):
        batch(normalize="none")
    with pytest.raises(DataError, match=r"data\.normalize names c; the dense columns are: a, b"):
        batch(normalize={"c": "log"})
    with pytest.raises(DataError, match=r"data\.normalize gives a 'sqrt'; expected one of auto, standard, log, none"):
        batch(normalize={"a": "sqrt"})
