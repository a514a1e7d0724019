"""From the spec of the data to the tables of the collection."""

from __future__ import annotations

import pytest
from torchrec.modules.embedding_configs import PoolingType

from hetrec.data import FeatureSpec, SparseFeature, TableSpec
from hetrec.tables import embedding_bag_tables


def test_tables_follow_the_spec() -> None:
    spec = FeatureSpec(
        dense=(),
        sparse=(SparseFeature("home", "city"), SparseFeature("tags", "tag"), SparseFeature("work", "city")),
        tables=(TableSpec("tag", pooling="mean"), TableSpec("unread", 7), TableSpec("city", num_embeddings=100)),
        label="y",
    )
    tag, city = embedding_bag_tables(spec, width=8, row_init=0.5)
    assert (tag.name, tag.num_embeddings, tag.pooling, tag.feature_names) == ("tag", 0, PoolingType.MEAN, ["tags"])
    assert (city.name, city.num_embeddings, city.pooling) == ("city", 100, PoolingType.SUM)
    assert city.feature_names == ["home", "work"]
    for table in (tag, city):
        assert table.embedding_dim == 8
        assert (table.get_weight_init_min(), table.get_weight_init_max()) == (-0.5, 0.5)


@pytest.mark.parametrize(("dim", "row_init", "message"), [(0, 0.1, "rows of 0 columns"), (4, -0.1, "row_init is -0.1")])
def test_impossible_widths_and_ranges_are_refused(dim: int, row_init: float, message: str) -> None:
    spec = FeatureSpec((), (SparseFeature("a", "a"),), (TableSpec("a"),), "y")
    with pytest.raises(ValueError, match=message):
        embedding_bag_tables(spec, dim, row_init)
