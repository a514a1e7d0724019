"""Each model's logits and gradients against the paper's formula in plain PyTorch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from cache_backend import CacheConfig, EmbeddingOptimizer, LocalStore
from hetrec.ctr_task import CTRTask
from hetrec.data import FeatureSpec
from models.dcn import DCN
from models.deepfm import DeepFM, pairwise_interactions
from models.wdl import WDL
from tests.models.ctr import BAGS, SIMPLE, WEIGHTED, copy_dense, initial_rows, keys_of, make_batches, plain_bags
from tests.models.plain import PlainDCN, PlainDeepFM, PlainModel, PlainWDL

SIZES = (16, 8)
SPECS = {"simple": (SIMPLE, 1), "bags": (BAGS, 4), "weighted": (WEIGHTED, 3)}
MODELS = {
    "wdl": (partial(WDL, mlp_sizes=SIZES), partial(PlainWDL, sizes=SIZES)),
    "deepfm": (partial(DeepFM, mlp_sizes=SIZES), partial(PlainDeepFM, sizes=SIZES)),
    "dcn vector": (partial(DCN, mlp_sizes=SIZES, cross="vector"), partial(PlainDCN, sizes=SIZES, cross="vector")),
    "dcn matrix": (partial(DCN, mlp_sizes=SIZES, cross="matrix"), partial(PlainDCN, sizes=SIZES, cross="matrix")),
}


def plain_of(task: CTRTask, make: partial[PlainModel], spec: FeatureSpec, keys: list[torch.Tensor]) -> PlainModel:
    configs = task.embeddings.embedding_bag_configs()
    tables = [i for i, config in enumerate(configs) for _ in config.feature_names]
    modes = [config.pooling.value.lower() for config in configs]
    plain = make(initial_rows(task, keys), tables, modes, len(spec.dense))
    copy_dense(task, plain)
    return plain


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", SPECS)
def test_logits_and_dense_gradients_are_those_of_the_formula(model: str, data: str) -> None:
    make_ours, make_plain = MODELS[model]
    spec, longest_bag = SPECS[data]
    torch.manual_seed(0)
    # Rows of order 1, so that second-order terms weigh as much as first-order ones.
    task = make_ours(spec, embedding_dim=4, row_init=1.0)
    task.embeddings.open(LocalStore(), CacheConfig(rows=1024), EmbeddingOptimizer(), seed=3)
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # zeros at the start would hide terms
    (batch,) = make_batches(spec, 1, batch_size=16, longest_bag=longest_bag)
    keys = keys_of(task, [batch])
    plain = plain_of(task, make_plain, spec, keys)

    ours = task(batch.dense_features, batch.sparse_features)
    theirs = plain(batch.dense_features, plain_bags(task, batch, keys))

    assert ours.shape == (16,)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    binary_cross_entropy_with_logits(ours, batch.labels).backward()
    binary_cross_entropy_with_logits(theirs, batch.labels).backward()
    our_parameters = dict(task.named_parameters())
    for name, counterpart in plain.names_in_the_project().items():
        gradient = plain.get_parameter(name).grad
        found = our_parameters[counterpart].grad
        assert gradient is not None
        assert found is not None
        torch.testing.assert_close(found.reshape(gradient.shape), gradient, rtol=1e-3, atol=1e-4)
    task.embeddings.close()


def test_every_dense_parameter_has_a_counterpart_in_the_formula() -> None:
    for make_ours, make_plain in MODELS.values():
        task = make_ours(SIMPLE, embedding_dim=4)
        width = task.row_width
        plain = make_plain([torch.zeros(1, width)] * 4, range(4), ["sum"] * 4, 3)
        assert sorted(plain.names_in_the_project().values()) == sorted(name for name, _ in task.named_parameters())


def test_second_order_term_of_three_known_vectors() -> None:
    # <v1,v2> + <v1,v3> + <v2,v3> = (3 + 8) + (-1 + 0) + (-3 + 0)
    emb_BFD = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [-1.0, 0.0]]])
    torch.testing.assert_close(pairwise_interactions(emb_BFD), torch.tensor([7.0]))


def test_one_feature_alone_has_no_second_order_term() -> None:
    torch.testing.assert_close(pairwise_interactions(torch.randn(5, 1, 8)), torch.zeros(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [WDL, DeepFM, DCN])
def test_an_empty_batch_gives_no_logits(make: type[CTRTask]) -> None:
    task = make(SIMPLE)  # type: ignore[call-arg]
    task.embeddings.open(LocalStore(), CacheConfig(rows=64), EmbeddingOptimizer())
    (batch,) = make_batches(SIMPLE, 1, batch_size=0)
    assert task(batch.dense_features, batch.sparse_features).shape == (0,)
    task.embeddings.close()


def test_an_unknown_kind_of_cross_layer_names_the_choices() -> None:
    with pytest.raises(ValueError, match="cross is 'full'; choose one of: vector, matrix"):
        DCN(SIMPLE, cross="full")  # type: ignore[arg-type]


def test_a_model_without_sparse_features_is_refused() -> None:
    with pytest.raises(ValueError, match="no sparse features"):
        WDL(FeatureSpec(dense=("d",), sparse=(), tables=(), label="y"))


@pytest.mark.parametrize("make", [WDL, DeepFM, DCN])
def test_without_hidden_layers_the_deep_part_is_linear(make: type[CTRTask]) -> None:
    task = make(SIMPLE, embedding_dim=4, mlp_sizes=())  # type: ignore[call-arg]
    task.embeddings.open(LocalStore(), CacheConfig(rows=256), EmbeddingOptimizer())
    (batch,) = make_batches(SIMPLE, 1, batch_size=8)
    assert task(batch.dense_features, batch.sparse_features).shape == (8,)
    task.embeddings.close()
