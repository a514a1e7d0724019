"""What all data modules share: splits, loaders, ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from math import isqrt
from os.path import expanduser
from typing import Any, Literal

from pytorch_lightning import LightningDataModule
from torch import distributed

from datamodules.dense_pass import dense_statistics
from datamodules.errors import DataError
from datamodules.files import ParquetFiles, read_column
from datamodules.loader import ParquetLoader
from datamodules.plan import EpochPlan, Rows, Unit, make_units
from datamodules.progress import say
from datamodules.reader import Columns, WindowReader
from hetrec.data import FeatureSpec
from hetrec.dense_statistics import DenseStatistics
from hetrec.lookahead import LookaheadLoader

__all__ = ["HetDataModule", "Role"]

_SMALLEST_BATCH, _LARGEST_BATCH = 16, 2048

Role = Literal["path", "val_path", "test_path"]
Split = Literal["train", "val", "test"]


class HetDataModule(LightningDataModule):
    """Parquet files as loaders of :class:`hetrec.data.Batch`.

    Where ``val_path`` or ``test_path`` is given, its rows are that split and the fraction of that name is not used.
    The other splits are cut out of ``path``.

    Args:
        path: the training rows.
        val_path: the validation rows, or None.
        test_path: the test rows, or None.
        val_fraction: share of ``path``'s rows that are the validation split.
        test_fraction: share of ``path``'s rows that are the test split.
        split: ``hash``: rows are drawn by a hash of their position and ``seed``. ``order``: the first rows train, then
            come validation and test; each of the two has its fraction of the rows, rounded.
        batch_size: rows per step and rank. None: the largest power of two that is at most the square root of the number
            of training rows, divided by the ranks, from 16 to 2,048; and 2,048 in evaluation. Small data need many
            small steps to learn more than a logistic regression does.
        num_workers: processes that read. 0: a thread of the training process reads.
        lookahead: batches whose keys are known in advance.
        shuffle: whether the training rows are shuffled in every epoch.
        shuffle_buffer: rows that are shuffled together, after the order of the row groups was shuffled. The memory of a
            reader is about twice this number of rows.
        seed: of the split and of the order of rows.
    """

    def __init__(
        self,
        path: str,
        val_path: str | None = None,
        test_path: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        split: Literal["hash", "order"] = "hash",
        batch_size: int | None = None,
        num_workers: int = 0,
        lookahead: int = 1,
        shuffle: bool = True,
        shuffle_buffer: int = 65536,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", 1 if batch_size is None else batch_size, 1),
            ("num_workers", num_workers, 0),
            ("lookahead", lookahead, 0),
            ("shuffle_buffer", shuffle_buffer, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise DataError(f"data.{name}={value}; expected {least} or more")
        val = val_fraction if val_path is None else 0.0
        test = test_fraction if test_path is None else 0.0
        if min(val, test) < 0 or val + test >= 1:
            raise DataError(
                f"data.val_fraction={val} and data.test_fraction={test}; expected shares of 0 or more "
                f"whose sum is below 1, so that rows are left for training"
            )
        if split not in ("hash", "order"):
            raise DataError(f"data.split={split!r}; expected hash or order")
        self.path = expanduser(path)  # a shell leaves the ~ of data.path=~/criteo as it is
        self.val_path = val_path and expanduser(val_path)
        self.test_path = test_path and expanduser(test_path)
        self.val_fraction = val
        self.test_fraction = test
        self.split = split
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.lookahead = lookahead
        self.shuffle = shuffle
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self._files: dict[str, ParquetFiles] = {}
        self._units: dict[tuple[Role, Rows], tuple[Unit, ...]] = {}
        self._told_size: int | None = None
        self._announced = False  # prepare_data is called before every stage; what it found is said once
        self._loaders: list[LookaheadLoader] = []

    @property
    @abstractmethod
    def spec(self) -> FeatureSpec:
        """Dense columns, sparse features, tables, label. Known before any data are read or made."""

    @abstractmethod
    def columns(self, labelled: bool) -> Columns:
        """How the columns of the Parquet files become arrays. Not ``labelled``: the label is not read."""

    @abstractmethod
    def open_files(self, role: Role) -> ParquetFiles:
        """The Parquet files behind one of the three paths. Called after ``prepare_data``."""

    @property
    def has_val(self) -> bool:
        """Whether there is a validation split."""
        return self.val_path is not None or self.val_fraction > 0

    @property
    def has_test(self) -> bool:
        """Whether there is a test split."""
        return self.test_path is not None or self.test_fraction > 0

    def setup(self, stage: str | None = None) -> None:
        """Reads the footers of the files that the stage needs, and checks that every split holds rows and labels."""
        of_stage: dict[str | None, list[Split]] = {"validate": ["val"], "test": ["test"], "predict": []}
        every: list[Split] = ["train", "val", "test"]
        for split in of_stage.get(stage, every):
            if split == "train" or (split == "val" and self.has_val) or (split == "test" and self.has_test):
                self._check_split(split)

    def _check_split(self, split: Split) -> None:
        files, rows = self._split_rows(split)
        role = self._role(split)
        label = self.spec.label
        holders = set(files.holders(label))
        for path in files.paths:
            if path not in holders:
                raise DataError(self.missing_label_message(path, role))
        if not self._units_of(role, rows):
            raise DataError(
                f"the {split} split is empty: data.{role}={getattr(self, role)!r} has {files.rows} rows, with "
                f"val_fraction={self.val_fraction} and test_fraction={self.test_fraction}. Give more rows, or "
                f"other fractions"
            )

    def missing_label_message(self, file: str, role: Role) -> str:
        """Says that a file, which belongs to the path of that role, has no label."""
        return (
            f"{file} has no label column {self.spec.label!r}; training and evaluation need one in every file. "
            f"Name the right column with data.label, or leave the file out"
        )

    def _role(self, split: Split) -> Role:
        if split == "val" and self.val_path is not None:
            return "val_path"
        if split == "test" and self.test_path is not None:
            return "test_path"
        return "path"

    def _open(self, role: Role) -> ParquetFiles:
        if role not in self._files:
            self._files[role] = self.open_files(role)
        return self._files[role]

    def _split_rows(self, split: Split) -> tuple[ParquetFiles, Rows]:
        role = self._role(split)
        files = self._open(role)
        total = files.rows
        if role != "path":
            return files, Rows(0, total)
        if self.split == "order":
            test, val = round(total * self.test_fraction), round(total * self.val_fraction)
            bounds = {
                "train": (0, total - val - test),
                "val": (total - val - test, total - test),
                "test": (total - test, total),
            }
            return files, Rows(*bounds[split])
        # Validation from the bottom, test from the top: changing one fraction leaves the other split as it was.
        ranges = {
            "train": (self.val_fraction, 1.0 - self.test_fraction),
            "val": (0.0, self.val_fraction),
            "test": (1.0 - self.test_fraction, 1.0),
        }
        if ranges[split] == (0.0, 1.0):
            return files, Rows(0, total)
        return files, Rows(0, total, ranges[split], self.seed)

    def dense_statistics(self) -> DenseStatistics:
        """Of this rank's share of the training rows, for the normalisation of raw dense columns. One pass over them."""
        rows = self._split_rows("train")[1]
        rank, world_size = self._rank()
        return dense_statistics(
            self._open("path"), rows, self._units_of("path", rows), self.columns(False).dense, rank, world_size
        )

    def train_dataloader(self) -> LookaheadLoader:
        # overfit_batches asks for the same batches in every epoch.
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        return self._split_loader("train", shuffle=self.shuffle and not overfit)

    def val_dataloader(self) -> LookaheadLoader | list[Any]:
        return self._split_loader("val") if self.has_val else []

    def test_dataloader(self) -> LookaheadLoader | list[Any]:
        return self._split_loader("test") if self.has_test else []

    def predict_dataloader(self) -> LookaheadLoader:
        """All rows of ``path``, in their order. Labels are not needed, and NaN in the batches."""
        return self._loader("path", Rows(0, self._open("path").rows), labelled=False)

    def predict_values(self, column: str) -> Iterator[Any]:
        """The values of a column, feature or not, in the rows that this rank predicts, as Arrow arrays of one type.

        Raises:
            DataError: the files have no such column.
        """
        files, (rank, world_size) = self._open("path"), self._rank()
        if column not in files.columns:
            raise DataError(f"id_column={column}: data.path={self.path!r} has: {', '.join(files.columns)}")
        return read_column(files, column, files.rows * rank // world_size, files.rows * (rank + 1) // world_size)

    def _split_loader(self, split: Split, shuffle: bool = False) -> LookaheadLoader:
        role, rows = self._role(split), self._split_rows(split)[1]
        return self._loader(role, rows, shuffle, batch_size=self._fitting_size(rows) if split == "train" else None)

    def _fitting_size(self, rows: Rows) -> int | None:
        """The batch size that suits so many training rows, where none is given."""
        if self.batch_size is not None:
            return None
        total = sum(unit.kept for unit in self._units_of("path", rows))
        share = max(1, isqrt(total) // self._rank()[1])
        size = min(max(1 << (share.bit_length() - 1), _SMALLEST_BATCH), _LARGEST_BATCH)
        if size != self._told_size:
            say(f"batches of {size} rows, for {total:,} training rows; data.batch_size sets another size")
            self._told_size = size
        return size

    def _units_of(self, role: Role, rows: Rows) -> tuple[Unit, ...]:
        if (role, rows) not in self._units:  # a hash split of billions of rows takes a while to count
            self._units[role, rows] = tuple(make_units(self._open(role).group_rows, rows))
        return self._units[role, rows]

    def _loader(
        self, role: Role, rows: Rows, shuffle: bool = False, labelled: bool = True, batch_size: int | None = None
    ) -> LookaheadLoader:
        files = self._open(role)
        rank, world_size = self._rank()
        plan = EpochPlan(
            units=self._units_of(role, rows),
            batch_size=batch_size or self.batch_size or _LARGEST_BATCH,
            window_rows=self.shuffle_buffer,
            shuffle=shuffle,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        reader = WindowReader(files, rows, self.columns(labelled), plan)
        loader = LookaheadLoader(ParquetLoader(reader, self.spec.sparse_names, self.num_workers), self.lookahead)
        self._loaders.append(loader)
        return loader

    def _rank(self) -> tuple[int, int]:
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1

    def teardown(self, stage: str | None = None) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
