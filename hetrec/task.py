"""The Lightning task behind every model: the life of its embedding collection, from the store to the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from cache_backend import CacheConfig, EmbeddingOptimizer, EmbeddingStore, LocalStore
from hetrec.checkpoint_io import RESTORE_FROM, EmbeddingCheckpointIO
from hetrec.collection import HetCollection
from hetrec.data import Batch, FeatureSpec
from hetrec.metrics import Evaluation, TrainingMeter
from hetrec.optimizers import add_embedding_group, apply_overrides, configured, embedding_group
from hetrec.resume import TASK, check_fits, rest_is_to_come, why_nothing_was_trained

__all__ = ["HetTask"]

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], Any]

CONFIGURED = "configured_optimizer"  # in the .ckpt: what hetrec.optimizers.configured said


class HetTask(LightningModule):
    """Base of the tasks, which add what a batch's loss is and what is measured in evaluation.

    The dense parameters train as in any Lightning program. The embedding rows live in ``self.embeddings``, backed by
    the store that ``connect`` names; they are stepped by the same optimizer (see ``hetrec.optimizers``), so schedules,
    gradient accumulation and skipped steps treat both alike. ``gradient_clip_val`` clips the dense parameters only;
    ``max_gradient`` and ``max_gradient_norm`` of ``EmbeddingOptimizer`` clip the rows.

    Logs ``train_loss``, ``samples_per_s``, ``hit_rate``, ``exchange_wait`` (the share of the time that steps waited for
    the store), ``rows_fetched``, ``rows_pushed``, ``rows_evicted``, ``rows_refreshed`` (at their staleness bound),
    ``rows_bypassed``, ``rows_overflowed``, ``rows_nonfinite`` (see ``CacheStats``; counts since the start of training),
    ``bytes_per_step`` (of one rank, both ways), ``staleness_p50``, ``staleness_p99`` (observed: see
    ``CacheStats.lags``; where several ranks share the store), and the task's metrics over the whole epoch and all
    ranks, as ``val_...`` and ``test_...``.

    Args:
        spec: columns of the data.
        embeddings: the collection of its sparse features' tables.
        evaluation: makes what is measured in validation and in test.
    """

    #: The validation metric that the best checkpoint is chosen by; more is better.
    monitor: str

    def __init__(self, spec: FeatureSpec, embeddings: HetCollection, evaluation: Callable[[], Evaluation]) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = embeddings
        self.val_metrics = evaluation()
        self.test_metrics = evaluation()
        self.training_figures: dict[str, float] = {}  # of the last fit, once it has ended
        self.training_lags: list[int] = []  # of the last fit, over all ranks: see CacheStats.lags
        #: Set, it is the learning rate of dense parameters and rows in place of their own: Lightning's finder sets it.
        self.lr: float | None = None
        self._meter: TrainingMeter | None = None
        self._configured: list[dict[str, Any]] = []
        self._resumed: list[dict[str, Any]] | None = None
        self._first_step = 0  # of the running fit
        self._step_due = False
        self._stepped = False
        self._rows_overflow = torch.tensor(False)
        self.connect()
        self.optimize_with(partial(Adagrad, lr=0.02))  # unlike a lambda, it can be sent to other processes

    # What a task adds.

    def loss(self, batch: Batch) -> Tensor:
        """The batch's training loss, a scalar; of an empty batch one whose gradients are zero."""
        raise NotImplementedError

    def evaluate(self, batch: Batch, metrics: Any) -> Tensor | None:
        """Measure a batch: update what ``evaluation`` made. What it returns is handed to callbacks of a test."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> HetTask:
        """A task with dense parameters of its own, and the same store: what averages weights copies the task, and
        the rows are shared."""
        memo[id(self._store)] = self._store
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(self.__getstate__(), memo))
        return copied

    # What to train with: called before the trainer runs.

    def connect(
        self,
        store: EmbeddingStore | None = None,
        cache: CacheConfig | None = None,
        optimizer: EmbeddingOptimizer | None = None,
        seed: int = 0,
    ) -> None:
        """Remembers the store, the cache's settings, the rows' optimizer and the seed of their initial values.

        Nothing is opened before the trainer sets the task up. The defaults are an in-process store and default
        settings.
        """
        self._store = store if store is not None else LocalStore()
        self._cache = cache if cache is not None else CacheConfig()
        self._row_optimizer = optimizer if optimizer is not None else EmbeddingOptimizer()
        self._seed = seed

    @property
    def staleness(self) -> int:
        """The bound s of tables that have none of their own."""
        return self._cache.staleness

    def optimize_with(self, optimizer: OptimizerFactory, lr_scheduler: SchedulerFactory | None = None) -> None:
        """Remembers how to make the optimizer of the dense parameters and, optionally, the scheduler on top of it.

        The embeddings' parameter group is added in between, so the schedule reaches the rows too.
        """
        self._make_optimizer = optimizer
        self._make_scheduler = lr_scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self.parameters())
        add_embedding_group(optimizer, self._row_optimizer.lr, self._step_rows)
        if self.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr
        self._configured = configured(optimizer)
        if self._make_scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer)
        config = {"scheduler": scheduler}
        if hasattr(scheduler, "monitor"):  # Lightning's ReduceLROnPlateau says what it watches
            config["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _step_rows(self, lr: float) -> None:
        self._stepped = True
        self.embeddings.step(lr=lr)

    # The life of the embeddings.

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1 and self._store.exclusive:
            raise ValueError(
                f"{self.trainer.world_size} ranks cannot share a {type(self._store).__name__}, which lives in one "
                "process: set trainer.devices=1 and trainer.num_nodes=1, or use a store that ranks share"
            )
        io = self.trainer.strategy.checkpoint_io
        dense_io = io.dense if isinstance(io, EmbeddingCheckpointIO) else io
        self.trainer.strategy.checkpoint_io = EmbeddingCheckpointIO(dense_io, self._store.snapshot)
        self.embeddings.close()  # left open where an earlier run was interrupted
        # The model was made before the data were prepared; by now the data module may have counted the rows.
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        spec = getattr(datamodule, "spec", self.spec)
        self.embeddings.open(
            self._store,
            self._cache,
            self._row_optimizer,
            seed=self._seed,
            world_size=self.trainer.world_size,
            expected_rows={table.name: table.rows for table in spec.tables if table.rows is not None},
        )

    def configure_callbacks(self) -> Sequence[Callback]:
        there = any(isinstance(callback, _FlushWhenInterrupted) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if there else [_FlushWhenInterrupted()]

    def teardown(self, stage: str) -> None:
        self._meter = None
        self._resumed = None
        self.embeddings.close()

    @property
    def dense_dtype(self) -> torch.dtype:
        """Of the dense parameters, and so of what they meet; rows stay float32 in cache and store."""
        assert isinstance(self.dtype, torch.dtype)
        return self.dtype

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        # Keys stay where the cache is, in host memory; and as they are: rows fetched ahead for a batch are found by the
        # identity of its KeyedJaggedTensor.
        dense, labels = batch.dense_features.to(device, self.dense_dtype), batch.labels.to(device)
        if labels.is_floating_point():
            labels = labels.to(self.dense_dtype)
        return replace(batch, dense_features=dense, labels=labels)

    def on_device(self, rows: Tensor) -> Tensor:
        """Looked-up rows, where the dense parameters are; what a gradient scaler does to parameters is done to them."""
        rows = rows.to(self.device, self.dense_dtype)
        scaler = self._gradient_scaler()
        if scaler is not None and rows.requires_grad:
            rows.register_hook(partial(self._unscale_rows, scaler.get_scale()))
        return rows

    def _unscale_rows(self, scale: float, gradient: Tensor) -> Tensor:
        """The scaler unscales and judges the gradients of parameters; those of rows leave autograd here."""
        self._rows_overflow = self._rows_overflow | ~gradient.isfinite().all()
        return gradient / scale

    def on_after_backward(self) -> None:
        """Under a gradient scaler: rows whose gradient is not finite, on any rank, keep every rank from the step."""
        if self._gradient_scaler() is None:
            return
        overflow = self.trainer.strategy.reduce(self._rows_overflow.float().to(self.device), reduce_op="max")
        self._rows_overflow = torch.tensor(False)
        if overflow:  # said by the gradient of a parameter, since those are what the scaler judges
            next(p.grad for p in self.parameters() if p.grad is not None).fill_(torch.inf)

    def _gradient_scaler(self) -> torch.amp.GradScaler | None:
        if self._trainer is None:
            return None
        precision = self.trainer.precision_plugin
        return precision.scaler if isinstance(precision, MixedPrecision) else None

    # Training.

    #: torch.compile(task) compiles training_step; tracing what Lightning does here fails.
    log = torch.compiler.disable(LightningModule.log)

    def on_fit_start(self) -> None:
        if self._resumed is None:
            self._first_step = self.trainer.global_step
        if len(self.trainer.optimizers) != 1 or embedding_group(self.trainer.optimizers[0]) is None:
            raise ValueError(
                "the embedding rows are stepped by one optimizer with a group of their own, and "
                f"{len(self.trainer.optimizers)} optimizers without it were configured: hand the optimizer to "
                "optimize_with(), or use hetrec.optimizers.add_embedding_group in configure_optimizers()"
            )
        known = getattr(self.trainer.datamodule, "lookahead", None)  # type: ignore[attr-defined]
        if known is not None and 1 < self._cache.prefetch_depth > known:
            rank_zero_warn(
                f"cache.prefetch_depth is {self._cache.prefetch_depth}, but only data.lookahead={known} coming batches "
                f"are known: set data.lookahead={self._cache.prefetch_depth}"
            )
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
                rank_zero_info(
                    f"{type(callback).__name__} averages the dense parameters; the embedding rows are not averaged, "
                    "and are always those of the latest step"
                )
        if self.trainer.gradient_clip_val:
            rank_zero_info(
                "gradient_clip_val clips the dense parameters only; embedding.max_gradient (by value) and "
                "embedding.max_gradient_norm (by the norm of each row) clip the embedding rows"
            )

    def on_fit_end(self) -> None:
        if self.trainer.global_step == self._first_step:
            rank_zero_warn(why_nothing_was_trained(self.trainer))

    def on_train_start(self) -> None:
        if self._resumed and self._configured:  # empty where a subclass configures its optimizer by itself
            schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
            apply_overrides(self.trainer.optimizers[0], schedulers, then=self._resumed, now=self._configured)
        self._meter = TrainingMeter(self.embeddings.stats, self._sum_over_ranks)

    def on_train_epoch_start(self) -> None:
        assert self._meter is not None
        self._meter.resume()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.embeddings.begin(batch.sparse_features, batch.upcoming)
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=batch.batch_size)
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._step_due = True

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        assert self._meter is not None
        self._meter.add(batch.batch_size)
        if self._step_due:
            if not self._stepped:  # the gradient scaler found an infinite gradient and skipped the step
                self.embeddings.discard()
            log_every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by Lightning's logger half
            if log_every and self.trainer.global_step % log_every == 0:
                self.log_dict(self._meter.window(), batch_size=batch.batch_size)
        self._step_due = self._stepped = False

    def on_train_epoch_end(self) -> None:
        assert self._meter is not None
        self._meter.pause()  # checkpoints of the epoch are written next

    def on_train_end(self) -> None:
        assert self._meter is not None
        self._flush_all_ranks()
        self.training_figures = self._meter.total()
        self.training_lags = self._meter.lags()

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        total = self.trainer.strategy.reduce(values.to(self.device), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total

    # Evaluation: reads rows from the store, which a flush has brought up to date, and changes nothing.

    def _flush_all_ranks(self) -> None:
        """Afterwards every rank reads the same rows."""
        self.embeddings.flush()
        self.trainer.strategy.barrier("every rank has flushed")

    def on_validation_start(self) -> None:
        if self._meter is not None:
            self._meter.pause()
        self._flush_all_ranks()

    def on_validation_end(self) -> None:
        if self._meter is not None:
            self._meter.resume()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val", self.val_metrics)

    def on_test_start(self) -> None:
        self._flush_all_ranks()

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return self.evaluate(batch, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test", self.test_metrics)

    def on_predict_start(self) -> None:
        self._flush_all_ranks()

    def _log_evaluation(self, stage: str, metrics: Evaluation) -> None:
        # Already over all ranks: averaging equal figures changes nothing, and tells Lightning so.
        for name, value in metrics.compute_and_reset().items():
            if math.isnan(value) and f"val_{name}" == self.monitor and not self.trainer.sanity_checking:
                rank_zero_warn(f"{stage}_{name} is undefined (nan): the {stage} rows {metrics.why_undefined}")
            self.log(f"{stage}_{name}", value, prog_bar=f"val_{name}" == self.monitor, sync_dist=True)

    # Checkpoints: see hetrec.checkpoint_io.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.embeddings.is_open:  # otherwise the run has ended, and with it everything was flushed
            self.embeddings.flush()
        self.trainer.strategy.barrier("every rank has flushed")
        checkpoint[CONFIGURED] = self._configured
        checkpoint[TASK] = type(self).__name__
        rest_is_to_come(checkpoint, self.trainer.num_training_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        snapshot = checkpoint.get(RESTORE_FROM)
        if snapshot is None:
            raise ValueError(
                "this checkpoint holds the dense parameters only; its embeddings lie in a snapshot beside it, which a "
                "trainer restores: call trainer.fit, validate, test or predict with ckpt_path=..."
            )
        tasks = [each.__name__ for each in type(self).__mro__]
        check_fits(checkpoint, Path(snapshot), tasks, self.state_dict(), self.embeddings.table_names())
        if self.trainer.is_global_zero:
            self._store.restore(Path(snapshot))
        self.trainer.strategy.barrier("the embeddings are restored")
        self.embeddings.reset()
        self._resumed = checkpoint[CONFIGURED]
        self._first_step = checkpoint["global_step"]


class _FlushWhenInterrupted(Callback):
    """Ctrl-C and SIGTERM are clean ends too: what the cache holds back reaches the store."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        assert isinstance(pl_module, HetTask)
        if pl_module._cache.consistency == "bsp":
            return  # nothing is held back but a step that the other ranks may not take any more
        if isinstance(exception, (KeyboardInterrupt, SIGTERMException)) and pl_module.embeddings.is_open:
            pl_module.embeddings.close()
