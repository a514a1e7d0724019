"""What the graph data modules share: splits of the nodes, loaders, ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from os.path import expanduser
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pytorch_lightning import LightningDataModule
from torch import distributed

from datamodules.errors import DataError
from datamodules.graph_format import SPLITS, Graph
from datamodules.graph_loader import GraphLoader
from datamodules.graph_reader import GraphReader, seed_plan
from datamodules.plan import Rows
from hetrec.data import NODE, GraphSpec, SparseFeature, TableSpec
from hetrec.lookahead import LookaheadLoader

__all__ = ["GraphModule", "Split"]

Split = Literal["train", "val", "test"]


class GraphModule(LightningDataModule):
    """A graph whose nodes are to be classified, as loaders of :class:`hetrec.data.GraphBatch`.

    Every batch holds some seed nodes and the neighbours that are sampled around them: in each hop, for every node that
    the hop before added, so many in-neighbours, uniformly and without replacement. Seeds are nodes with a label; each
    is a seed once an epoch.

    Args:
        path: where the graph is.
        fanouts: neighbours a node in each hop; -1: all. One hop for every layer of the model.
        eval_fanouts: the same for validation, test and prediction; null: all neighbours, so that the model's answer is
            exact. On a large graph that may be most of it for every batch: give numbers then. The sample is the same
            in every evaluation.
        val_fraction: share of the labelled nodes that are the validation split.
        test_fraction: share of the labelled nodes that are the test split.
        split: ``auto``: the data's own split where they bring one, else ``hash``. ``hash``: nodes are drawn by a hash
            of their id and ``seed``.
        batch_size: seeds per step and rank.
        num_workers: processes that sample. 0: a thread of the training process samples.
        lookahead: batches whose nodes are known in advance.
        shuffle: whether the seeds are shuffled in every epoch.
        seed: of the split, of the order of seeds and of the neighbours.
    """

    def __init__(
        self,
        path: str,
        fanouts: Sequence[int] = (10, 10),
        eval_fanouts: Sequence[int] | None = None,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        split: Literal["auto", "hash"] = "auto",
        batch_size: int = 512,
        num_workers: int = 0,
        lookahead: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("lookahead", lookahead, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise DataError(f"data.{name}={value}; expected {least} or more")
        if min(val_fraction, test_fraction) < 0 or val_fraction + test_fraction >= 1:
            raise DataError(
                f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction}; expected shares of 0 or "
                f"more whose sum is below 1, so that nodes are left for training"
            )
        if split not in ("auto", "hash"):
            raise DataError(f"data.split={split!r}; expected auto or hash")
        for name, hops in (("fanouts", fanouts), ("eval_fanouts", eval_fanouts)):
            if hops is not None and (not hops or any(h != -1 and h < 1 for h in hops)):
                raise DataError(
                    f"data.{name}={list(hops)}; expected a number a hop: 1 or more, or -1 for all neighbours"
                )
        if eval_fanouts is not None and len(eval_fanouts) != len(fanouts):
            raise DataError(
                f"data.eval_fanouts has {len(eval_fanouts)} hops and data.fanouts {len(fanouts)}; expected as many, "
                f"one for every layer of the model"
            )
        self.path = expanduser(path)  # a shell leaves the ~ of data.path=~/graph as it is
        self.fanouts = tuple(fanouts)
        self.eval_fanouts = (-1,) * len(self.fanouts) if eval_fanouts is None else tuple(eval_fanouts)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.split = split
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.lookahead = lookahead
        self.shuffle = shuffle
        self.seed = seed
        self._seeds: dict[Split, npt.NDArray[np.int64]] = {}
        self._loaders: list[LookaheadLoader] = []

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The graph, made or read if need be."""

    @property
    def spec(self) -> GraphSpec:
        """The node's id and the categorical columns, a table each; dense columns; classes."""
        graph = self.graph
        return self.make_spec(graph.nodes, graph.classes, graph.columns, graph.width)

    def make_spec(self, nodes: int, classes: int, columns: dict[str, int], width: int) -> GraphSpec:
        """``columns``: the size of every categorical column's table. Their keys a node are averaged."""
        if classes < 2:
            raise DataError(f"the graph at {self.path!r} has {classes} classes; to tell nodes apart takes two at least")
        return GraphSpec(
            dense=tuple(f"x{i}" for i in range(width)),
            sparse=tuple(SparseFeature(name, name) for name in (NODE, *columns)),
            tables=(
                TableSpec(NODE, num_embeddings=nodes),
                *(TableSpec(name, num_embeddings=size, pooling="mean") for name, size in columns.items()),
            ),
            label="label",
            num_classes=classes,
        )

    @property
    def has_val(self) -> bool:
        """Whether there is a validation split."""
        return self._has("val", self.val_fraction)

    @property
    def has_test(self) -> bool:
        """Whether there is a test split."""
        return self._has("test", self.test_fraction)

    def _has(self, split: Split, fraction: float) -> bool:
        return len(self._split_seeds(split)) > 0 if self._own_split else fraction > 0

    @property
    def _own_split(self) -> bool:
        return self.split == "auto" and self.graph.has_split

    def setup(self, stage: str | None = None) -> None:
        """Opens the graph, and checks that every split that the stage needs holds nodes."""
        of_stage: dict[str | None, list[Split]] = {"validate": ["val"], "test": ["test"], "predict": []}
        every: list[Split] = ["train", "val", "test"]
        wanted = {"train": True, "val": self.has_val, "test": self.has_test}
        for split in of_stage.get(stage, every):
            if wanted[split] and not len(self._split_seeds(split)):
                labelled = int(np.count_nonzero(self.graph.labels >= 0))
                raise DataError(
                    f"the {split} split is empty: {self.path!r} has {self.graph.nodes:,} nodes, {labelled:,} of them "
                    f"labelled, with split={self.split}, val_fraction={self.val_fraction} and "
                    f"test_fraction={self.test_fraction}. Give more labels, or other fractions"
                )

    def _split_seeds(self, split: Split) -> npt.NDArray[np.int64]:
        """The labelled nodes of a split, ascending."""
        if split not in self._seeds:
            graph = self.graph
            if self._own_split:
                chosen = graph.split == SPLITS[split]
            else:
                # As for rows: changing one fraction leaves the other split as it was.
                ranges = {
                    "train": (self.val_fraction, 1.0 - self.test_fraction),
                    "val": (0.0, self.val_fraction),
                    "test": (1.0 - self.test_fraction, 1.0),
                }
                chosen = np.asarray(Rows(0, graph.nodes, ranges[split], self.seed).mask(0, graph.nodes))
            self._seeds[split] = np.flatnonzero(chosen & (graph.labels >= 0))
        return self._seeds[split]

    def train_dataloader(self) -> LookaheadLoader:
        # overfit_batches asks for the same batches in every epoch.
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        seeds = self._split_seeds("train")
        return self._loader(seeds, self.fanouts, shuffle=self.shuffle and not overfit, every_epoch_differs=not overfit)

    def val_dataloader(self) -> LookaheadLoader | list[Any]:
        return self._loader(self._split_seeds("val"), self.eval_fanouts) if self.has_val else []

    def test_dataloader(self) -> LookaheadLoader | list[Any]:
        return self._loader(self._split_seeds("test"), self.eval_fanouts) if self.has_test else []

    def predict_dataloader(self) -> LookaheadLoader:
        """All nodes, in their order. Those without a label have the label -1."""
        return self._loader(np.arange(self.graph.nodes, dtype=np.int64), self.eval_fanouts)

    def _loader(
        self,
        seeds: npt.NDArray[np.int64],
        fanouts: tuple[int, ...],
        shuffle: bool = False,
        every_epoch_differs: bool = False,
    ) -> LookaheadLoader:
        plan = seed_plan(len(seeds), self.batch_size, shuffle, self.seed, *self._rank())
        reader = GraphReader(self.graph, seeds, plan, fanouts, every_epoch_differs)
        loader = LookaheadLoader(GraphLoader(reader, self.num_workers), self.lookahead)
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
