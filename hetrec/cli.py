"""The program: LightningCLI over the project's models, data sets, stores and caches.

Everything that LightningCLI does works here. This module adds the shorthand (:mod:`hetrec.arguments`), errors of one
line (:mod:`hetrec.errors`), the groups ``store``, ``cache`` and ``embedding``, and a folder of its own for every run.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from pytorch_lightning.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerCallable,
    OptimizerCallable,
)
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

from cache_backend import AutoStore, CacheConfig, EmbeddingOptimizer, EmbeddingStore
from cache_backend.disk import disk_is_full, room_for
from hetrec.arguments import EXPERIMENT, GROUPS, SUBCOMMANDS, choices, expand
from hetrec.callbacks import BestCheckpoint, PredictionWriter, RunSummary
from hetrec.ctr_task import CTRTask
from hetrec.data import FeatureSpec
from hetrec.errors import UserError, one_line, users_mistake
from hetrec.parser import HetArgumentParser
from hetrec.quiet import quiet
from hetrec.ranks import (
    TERMINATED,
    another_failed,
    end_others,
    interrupted_once,
    join_first_rank,
    launch_with_care,
    started_by_first_rank,
    tell_error,
)
from hetrec.resume import KEYWORDS, newest_checkpoint, run_name
from hetrec.task import HetTask
from hetrec.trained_columns import use_trained_columns

__all__ = ["HetCLI", "main"]

# A model takes its spec from the data module as one object; jsonargparse would ask for a dataclass field by field.
set_parsing_settings(subclasses_enabled=[FeatureSpec])


class HetCLI(LightningCLI):
    """LightningCLI for a :class:`~hetrec.task.HetTask` and a data module with ``spec`` and ``has_test``."""

    def __init__(self, **kwargs: Any) -> None:
        self._folder: str | None = None
        try:
            super().__init__(**kwargs)
        except BaseException as error:
            # A run that failed before it wrote anything leaves no folder behind; rmdir removes only an empty one.
            if self._folder is not None:
                with suppress(OSError):
                    os.rmdir(self._folder)
                if disk_is_full(error):  # while Lightning wrote: its loggers, config.yaml
                    with room_for(self._folder):
                        raise
            raise

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_subclass_arguments((EmbeddingStore, AutoStore), "store", required=True)
        parser.add_class_arguments(CacheConfig, "cache", sub_configs=True)
        parser.add_class_arguments(EmbeddingOptimizer, "embedding", sub_configs=True)
        # Not Lightning's own optimizer arguments: they replace configure_optimizers, and with it the parameter group
        # that steps the embedding rows.
        parser.add_argument("--optimizer", type=OptimizerCallable, help="optimizer of the dense parameters")
        parser.add_argument(
            "--lr_scheduler", type=LRSchedulerCallable | None, default=None, help="schedule of both learning rates"
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(BestCheckpoint, "best_checkpoint")
        parser.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "test":
            parser.set_defaults(verbose=False)  # the run's own summary says the same
        if subcommand == "predict":
            parser.add_argument(
                "--out", type=str | None, default=None, help="the file of the predictions, .parquet or .csv"
            )
            parser.add_argument(
                "--id_column", type=str | None, default=None, help="a column of the data to write beside them"
            )
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        # Lightning's own warns where it is given words and the process has words too; here they are the same ones.
        assert isinstance(args, list)
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Settings come from this command line and its files alone; a checkpoint brings back state.

        Lightning's own merges hyper-parameters saved in the checkpoint over the command line. Only columns that the
        data module would find by itself are those that the checkpoint was trained with.
        """
        settings = self.config[self.config.subcommand]
        path = settings.get("ckpt_path")
        if path in KEYWORDS:
            settings.ckpt_path = self._newest_checkpoint(path, settings)
        elif path is not None and not Path(path).is_file():
            raise UserError(
                f"no checkpoint file at {path!r}; a run's checkpoints are in its folder: RUN/checkpoints/*.ckpt, and "
                f"ckpt_path=last (or best) is that of the newest run"
            )
        if settings.get("ckpt_path") is not None:
            use_trained_columns(settings.data.init_args, Path(settings.ckpt_path))

    def _newest_checkpoint(self, keyword: str, settings: Namespace) -> str | None:
        model, data = (settings[part].class_path.rpartition(".")[2] for part in ("model", "data"))
        name = run_name(model, data, "fit")
        root = Path(settings.trainer.default_root_dir or "runs")
        given = (settings[part].dirpath for part in ("checkpoint", "best_checkpoint"))
        path = newest_checkpoint(keyword, root, name, [folder for folder in given if folder])
        looked = f"no earlier run {root / name}-* has left {KEYWORDS[keyword]}"
        if path is not None:
            rank_zero_info(f"ckpt_path={keyword}: {path}")
        elif self.config.subcommand == "fit":  # so that a script can say it before the first run, as in Lightning
            rank_zero_info(f"ckpt_path={keyword}: {looked}, so training starts afresh")
        else:
            raise UserError(f"ckpt_path={keyword}: {looked}; name a checkpoint file")
        return None if path is None else str(path)

    def after_instantiate_classes(self) -> None:
        settings = self.config_init[self.subcommand]
        store = settings.store
        if isinstance(store, AutoStore):
            store = self._automatic(store)
        if self.trainer.world_size > 1 and store.exclusive:
            # Here, before any other process is started.
            raise UserError(
                f"{self.trainer.world_size} ranks (trainer.devices x trainer.num_nodes) cannot share a "
                f"{type(store).__name__}, which lives inside one process: use store=auto or store=remote, or set "
                "trainer.devices=1"
            )
        self.model.connect(store, settings.cache, settings.embedding, seed=int(settings.seed_everything))
        self.model.optimize_with(settings.optimizer, settings.lr_scheduler)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]  # a connector of the trainer sets it
            if isinstance(callback, RunSummary):
                callback.test_follows = self.subcommand == "fit" and self.datamodule.has_test
            if self.subcommand == "predict" and isinstance(callback, PredictionWriter):
                callback.write_to(settings.out, settings.id_column)
            if isinstance(callback, ModelCheckpoint) and callback.monitor == CTRTask.monitor:  # the default
                callback.monitor = self.model.monitor

    def _automatic(self, store: AutoStore) -> EmbeddingStore:
        ranks = self.trainer.world_size
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        alien = environment is not None and environment.creates_processes_externally and not started_by_first_rank()
        if ranks > 1 and alien:
            raise UserError(
                f"store=auto cannot start servers for {ranks} ranks that another program started (torchrun, srun): "
                "start hetrec-ps, and set store=remote store.addresses=[...]"
            )
        chosen = store.for_ranks(ranks, self.trainer.num_nodes)
        if ranks > 1:
            servers = f"{store.shards} parameter server{'s' if store.shards > 1 else ''}"
            rank_zero_info(f"{ranks} ranks share {servers}, started for this run")
        return chosen

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        callbacks = [*(config["callbacks"] or []), *callbacks]
        if config["barebones"]:  # Lightning refuses it beside what configs/default.yaml and this class ask for
            off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            config.update(off, log_every_n_steps=0)
        if config["enable_checkpointing"] is False:
            callbacks = [c for c in callbacks if not isinstance(c, Checkpoint)]
        if config["enable_progress_bar"] is False:
            callbacks = [c for c in callbacks if not isinstance(c, ProgressBar)]
        if not config["fast_dev_run"]:
            folder = Path(config["default_root_dir"] or "runs") / self._run_name()
            if getattr(rank_zero_only, "rank", 0) == 0:  # the others are told by Trainer.log_dir
                folder = _new_folder(folder)
                self._folder = str(folder)
            config["default_root_dir"] = str(folder)
            if config["logger"] in (None, True):
                config["logger"] = [logger(folder, name="", version="") for logger in (TensorBoardLogger, CSVLogger)]
        try:
            trainer = super()._instantiate_trainer({**config, "callbacks": callbacks}, [])
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise UserError(f"trainer: {one_line(error)}") from error
        launch_with_care(trainer)
        return trainer

    def _run_name(self) -> str:
        name = run_name(type(self.model).__name__, type(self.datamodule).__name__, str(self.subcommand))
        return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"

    def after_fit(self) -> None:
        """Where there is a test split, ``fit`` ends by testing the model as training left it."""
        if self.datamodule.has_test:
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)


def main(configs: Path, argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit code.

    0: done. 1: the run failed on something the user can mend, which one line says (``hetrec.errors`` draws the line;
    ``HETREC_TRACEBACK=1`` shows where it came from). 2: the command line is wrong. 130, 143: interrupted, after pending
    updates were flushed. Anything else is a bug and raises. Of several ranks on a machine, the first one speaks.

    Args:
        configs: folder of ``default.yaml`` and the configuration groups.
        argv: words of the command line without the program's name (default: those of this process).
    """
    quiet(another_speaks=os.environ.get("LOCAL_RANK", "0") != "0")
    join_first_rank()
    with interrupted_once():
        try:
            _run(configs, sys.argv[1:] if argv is None else argv)
            end_others(failed=False)
        except BaseException as error:
            return _failed(error)
    return 0


def _run(configs: Path, argv: Sequence[str]) -> None:
    defaults = {"default_config_files": [str(configs / "default.yaml")]}
    HetCLI(
        model_class=HetTask,
        datamodule_class=LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        parser_class=HetArgumentParser,
        parser_kwargs={"description": _description(configs), **{name: dict(defaults) for name in SUBCOMMANDS}},
        auto_configure_optimizers=False,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        args=expand(argv, configs),
    )


def _failed(error: BaseException) -> int:
    """Says in one line what went wrong, ends the other ranks of the run, and returns the exit code. A bug raises."""
    mistake = users_mistake(error)
    of_another = another_failed() if isinstance(error, Exception) and mistake is None else None
    end_others(failed=not isinstance(error, SIGTERMException))
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SIGTERMException):
        return TERMINATED
    if isinstance(error, SystemExit):
        # Lightning turns Ctrl-C into exit code 1 once it has shut the run down; --help and --print_config end with 0.
        if isinstance(error.__context__, KeyboardInterrupt):
            return 130
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if os.environ.get("HETREC_TRACEBACK") == "1" and (mistake or of_another is not None):
        traceback.print_exception(error)
    if of_another is not None:
        if of_another:
            tell_error(of_another)
        return 1
    if mistake is None:
        raise error
    tell_error(one_line(mistake))
    return 2 if isinstance(mistake, UserError) else 1


def _new_folder(path: Path) -> Path:
    """Makes the folder, with a number behind its name if it exists: runs of the same second do not share one."""
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except OSError as error:
            if not candidate.is_dir():
                raise UserError(
                    f"cannot make the folder of this run, {candidate}: {error.strerror}; name a folder that can be "
                    "written to with trainer.default_root_dir"
                ) from error
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")


def _description(configs: Path) -> str:
    groups = "; ".join(f"{g}={'|'.join(choices(g, configs))}" for g in (*GROUPS, EXPERIMENT) if choices(g, configs))
    return (
        "Trains and evaluates models whose embedding tables live behind a cache. Instead of the options below, short "
        f"forms work too: python train.py model=deepfm data=criteo trainer.max_epochs=2. Groups: {groups}."
    )
