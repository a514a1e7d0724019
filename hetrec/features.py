"""From a batch's KeyedJaggedTensor to what the cache ops take, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cache_backend import ops
from cache_backend.cache import Bags, UniqueRows

__all__ = ["FeatureGroup", "check_features", "same_bags"]


def check_features(features: KeyedJaggedTensor, is_weighted: bool) -> None:
    """Reject malformed batches before anything is read.

    Raises:
        ValueError: lengths do not cover the values, or bag weights are missing or not finite.
        TypeError: keys are not integers.
    """
    values, lengths = features.values(), features.lengths()
    if values.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"keys must be int64 or int32, got {values.dtype}")
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(
            f"a bag has length {int(lengths.min())}; lengths (or differences of offsets) must be 0 or more"
        )
    if (total := int(lengths.sum())) != values.numel():
        raise ValueError(f"the lengths sum to {total}, but there are {values.numel()} keys")
    weights = features.weights_or_none()
    if is_weighted and weights is None:
        raise ValueError("the collection is weighted, but the batch has no weights: give the KeyedJaggedTensor weights")
    if weights is not None and is_weighted:
        if weights.numel() != values.numel():
            raise ValueError(f"there are {weights.numel()} weights for {values.numel()} keys; give one a key")
        if not bool((finite := weights.isfinite()).all()):
            position = int(finite.long().argmin())
            feature = features.keys()[sum(end <= position for end in features.offset_per_key()[1:])]
            raise ValueError(
                f"feature {feature!r}: the bag weight of key {int(values[position])} is {float(weights[position])}; "
                "bag weights must be finite"
            )


def same_bags(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    """Whether two batches hold the same bags of keys, their features in any order, whatever the weights."""
    if one.variable_stride_per_key() or other.variable_stride_per_key():
        return False
    if sorted(one.keys()) != sorted(other.keys()):
        return False
    if one.keys() != other.keys():
        names = other.keys()
        other = _without_weights(other).permute(list(map(names.index, one.keys())))
    values, others = one.values(), other.values()
    return (values is others or torch.equal(values, others)) and torch.equal(one.lengths(), other.lengths())


def _without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths(), stride=features.stride())


def full_batch(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch whose features have batch sizes of their own (TorchRec's VBE), with each bag as often as it is meant.

    Raises:
        ValueError: it does not say which bag stands for which sample.
    """
    inverse_indices = features.inverse_indices_or_none()
    if inverse_indices is None:
        raise ValueError(
            f"features of different batch sizes ({features.stride_per_key()}) can be pooled only if the "
            "KeyedJaggedTensor has inverse_indices"
        )
    keys, inverse = inverse_indices
    first_bag = torch.tensor([0, *features.stride_per_key()]).cumsum(0)
    bags = torch.cat([first_bag[i] + inverse[keys.index(key)].long() for i, key in enumerate(features.keys())])
    lengths = features.lengths()[bags]
    # Each bag's positions, one after the other: its start, and how far a position is behind it.
    starts = torch.repeat_interleave(features.offsets()[bags], lengths)
    behind = torch.arange(starts.numel()) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = (starts + behind).long()
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        features.keys(),
        features.values()[positions],
        weights=None if weights is None else weights[positions],
        lengths=lengths,
        stride=inverse.size(1),
    )


class FeatureGroup:
    """The features that read tables of one row format.

    Args:
        features: their names, in the order of the output.
        tables: store ids of their tables, per feature.
        table_names, table_rows: the tables' names and sizes (0: no size), per feature.
        mean: per feature, whether its bags are averaged; None: nothing is pooled.
    """

    def __init__(
        self,
        features: Sequence[str],
        tables: Sequence[int],
        table_names: Sequence[str],
        table_rows: Sequence[int],
        mean: Sequence[bool] | None,
    ) -> None:
        self.features = list(features)
        self.table_names = list(table_names)
        self._pooled = mean is not None
        self._mean = torch.tensor([False] if mean is None else list(mean), dtype=torch.uint8)
        self._tables = torch.tensor(list(tables), dtype=torch.int32)
        self._rows = torch.tensor(list(table_rows), dtype=torch.int64)

    def rows_and_bags(self, features: KeyedJaggedTensor) -> tuple[UniqueRows, Bags]:
        """The batch's unique rows and its bags, without their weights (see ``weights``).

        Raises:
            IndexError: a key is outside its table.
            KeyError: the batch lacks a feature.
        """
        if features.variable_stride_per_key() and self._pooled:
            features = full_batch(features)
        if (names := features.keys()) != self.features:
            absent = [name for name in self.features if name not in names]
            if absent:
                raise KeyError(f"the batch has no feature {', '.join(map(repr, absent))}; it has: {', '.join(names)}")
            if features.weights_or_none() is not None and self._pooled:  # `weights` brings them along
                features = _without_weights(features)
            features = features.permute([names.index(name) for name in self.features])
        keys = features.values().long().contiguous()
        lengths = features.lengths()
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
        samples = lengths.numel() // len(self.features)
        if features.variable_stride_per_key():
            splits = torch.tensor(features.offset_per_key())
        elif samples:
            splits = offsets[::samples].contiguous()
        else:
            splits = torch.zeros(len(self.features) + 1, dtype=torch.int64)
        if (position := int(ops.check_keys(keys, splits, self._rows))) >= 0:
            feature = int((splits[1:] <= position).sum())
            size = int(self._rows[feature])
            raise IndexError(
                f"table {self.table_names[feature]!r} has {size} rows (keys 0 to {size - 1}), but feature "
                f"{self.features[feature]!r} has key {int(keys[position])}; enlarge the table or give it no size"
            )
        rows = UniqueRows(*ops.unique_rows(keys, splits, self._tables))
        if not self._pooled:
            return rows, Bags(None, torch.arange(keys.numel() + 1), None, self._mean)
        bag_of = None
        if not (keys.numel() == lengths.numel() and bool((lengths == 1).all())):
            bags = torch.arange(lengths.numel(), dtype=torch.int32)
            bag_of = torch.repeat_interleave(bags, lengths.long())
        return rows, Bags(bag_of, offsets, None, self._mean)

    def weights(self, features: KeyedJaggedTensor) -> Tensor:
        """The weights of the batch's bags, float32 (N,), in the order of ``rows_and_bags``. Gradients find their way
        back to the batch's own weights."""
        if features.variable_stride_per_key():
            features = full_batch(features)
        weights = features.weights()
        if (names := features.keys()) != self.features:
            ends = features.offset_per_key()
            parts = [(ends[i], ends[i + 1]) for i in map(names.index, self.features)]
            weights = torch.cat([weights[begin:end] for begin, end in parts])
        return weights.float().contiguous()
