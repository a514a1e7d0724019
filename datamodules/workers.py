"""What runs in the worker processes of a loader. Imports neither Lightning nor TorchRec, so that they start quickly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from datamodules.errors import DataError
from datamodules.processes import process_context
from datamodules.reader import Window, WindowReader

__all__ = ["Request", "WindowWorkers"]

Request = tuple[int, int]  # epoch, window


class _Windows(Dataset[Window | DataError]):
    """Windows on request. A data error travels as a value, to keep its message clean."""

    def __init__(self, reader: WindowReader) -> None:
        self._reader = reader

    def __getitem__(self, request: Request) -> Window | DataError:
        try:
            return self._reader.read(*request)
        except DataError as error:
            return error


class _Requests(Sampler[Request]):
    """The windows of the coming epoch. The workers outlive epochs, so the epoch comes to them with each request."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


def _as_it_is(window: Any) -> Any:
    # The arrays of a window travel through a pipe: shared memory is small in many containers, and windows are not.
    return window


class WindowWorkers:
    """Processes that read windows. They start with the first request and stay for later ones."""

    def __init__(self, reader: WindowReader, processes: int) -> None:
        self._requests = _Requests()
        self._loader: DataLoader[Window | DataError] = DataLoader(
            _Windows(reader),
            sampler=self._requests,
            batch_size=None,
            num_workers=processes,
            collate_fn=_as_it_is,
            persistent_workers=True,
            multiprocessing_context=process_context(),
        )

    def read(self, requests: list[Request]) -> Iterator[Window]:
        """The windows that are asked for, in order."""
        self._requests.requests = requests
        for window in self._loader if requests else ():
            if isinstance(window, DataError):
                raise window
            yield window
