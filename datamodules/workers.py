"""What runs in the worker processes of a loader. Imports neither Lightning nor TorchRec, so that they start quickly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import DataLoader, Dataset, Sampler

from datamodules.errors import DataError
from datamodules.processes import process_context

__all__ = ["Reader", "Request", "Workers"]

Request = tuple[int, int]  # epoch, number of the window or batch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reader(Protocol[T_co]):
    """What workers run: a picklable object that reads a window, or a batch, by its number."""

    def read(self, epoch: int, number: int, /) -> T_co: ...


class _Readings(Dataset[T | DataError]):
    """Readings on request. A data error travels as a value, to keep its message clean."""

    def __init__(self, reader: Reader[T]) -> None:
        self._reader = reader

    def __getitem__(self, request: Request) -> T | DataError:
        try:
            return self._reader.read(*request)
        except DataError as error:
            return error


class _Requests(Sampler[Request]):
    """The requests of the coming epoch. The workers outlive epochs, so the epoch comes to them with each request."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


def _as_it_is(reading: Any) -> Any:
    # Arrays travel through a pipe: shared memory is small in many containers, and what is read is not.
    return reading


class Workers(Generic[T]):
    """Processes that read. They start with the first request and stay for later ones."""

    def __init__(self, reader: Reader[T], processes: int) -> None:
        self._requests = _Requests()
        self._loader: DataLoader[T | DataError] = DataLoader(
            _Readings(reader),
            sampler=self._requests,
            batch_size=None,
            num_workers=processes,
            collate_fn=_as_it_is,
            persistent_workers=True,
            multiprocessing_context=process_context(reader),
        )

    def read(self, requests: list[Request]) -> Iterator[T]:
        """What is asked for, in order."""
        self._requests.requests = requests
        failure: DataError | None = None
        for reading in self._loader if requests else ():
            if isinstance(reading, DataError):
                failure = reading
                break
            yield reading
        if failure is not None:
            # The workers end here. Left to the garbage collector, which takes the queues to them first, torch would
            # wait 5 s for every one.
            self._loader._iterator = None
            raise failure
