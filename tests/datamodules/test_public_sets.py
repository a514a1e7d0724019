"""Public data sets by their names: made lines in the layout of each, read through its configuration file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import yaml

from datamodules.keys import MISSING_KEY, keys_to_uint64
from datamodules.table import TableDataModule
from tests.datamodules.modules import column, labels
from tests.datamodules.reference import fnv1a

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "data"


def named(name: str, path: Path, content: str) -> TableDataModule:
    """The data module of ``data=NAME data.path=PATH``, of all rows in their order."""
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert config["class_path"] == "datamodules.table.TableDataModule"
    whole = {"val_fraction": 0.0, "test_fraction": 0.0, "shuffle": False}
    data = TableDataModule(str(path), **config["init_args"], **whole)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("file", ["train.csv", "train.gz"])
def test_avazu(file: str, tmp_path: Path) -> None:
    header = (
        "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
        "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
    )
    rest = "f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,96809ac8,711ee120,1,0,15704,320,50,1722,0,35"
    rows = [
        f"1000009418151094273,0,14102100,1005,0,1fbe01fe,{rest},-1,79",
        f"10000169349117863715,1,14102123,1002,1,85f751fd,{rest},100084,79",
    ]
    data = named("avazu", tmp_path / file, "\n".join([header, *rows]) + "\n")
    assert data.spec.dense == ()
    assert data.spec.sparse_names == [n for n in header.split(",") if n not in ("id", "click")]
    assert labels(data) == [0, 1]
    assert column(data, "hour") == [14102100, 14102123]
    assert column(data, "site_id") == [fnv1a(b"1fbe01fe"), fnv1a(b"85f751fd")]
    assert column(data, "app_category") == [fnv1a(b"07d7df22")] * 2
    assert column(data, "C20") == [-1, 100084]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("u.data", "196\t242\t3\t881250949\n186\t302\t4\t891717742\n22\t377\t5\t878887116\n"),
        ("ratings.dat", "196::242::3::978300760\n186::302::4::978302109\n22::377::5::978301968\n"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n196,242,3.5,1147880044\n186,302,4.0,1147\n22,377,5.0,9\n"),
    ],
    ids=["100K", "1M", "25M"],
)
def test_movielens(file: str, content: str, tmp_path: Path) -> None:
    data = named("movielens", tmp_path / file, content)
    assert (data.spec.dense, data.spec.sparse_names) == ((), ["userId", "movieId"])
    assert column(data, "userId") == [196, 186, 22]
    assert column(data, "movieId") == [242, 302, 377]
    assert labels(data) == [0, 1, 1]


def test_taobao(tmp_path: Path) -> None:
    header = "user,time_stamp,adgroup_id,pid,nonclk,clk\n"
    rows = "581738,1494137644,1,430548_1007,1,0\n449818,1494638778,3,430539_1007,0,1\n"
    data = named("taobao", tmp_path / "raw_sample.csv", header + rows)
    assert (data.spec.dense, data.spec.sparse_names) == ((), ["user", "adgroup_id", "pid"])
    assert column(data, "pid") == [fnv1a(b"430548_1007"), fnv1a(b"430539_1007")]
    assert labels(data) == [0, 1]


def test_kdd12(tmp_path: Path) -> None:
    content = (
        "0\t1\t4298118681424644510\t7686695\t385\t3\t3\t1601\t5521\t7709\t576\t490234\n"
        "2\t3\t14340390157469404125\t7686695\t385\t2\t1\t2255103\t317\t48989\t44771\t0\n"
    )
    data = named("kdd12", tmp_path / "training.txt", content)
    assert labels(data) == [0, 1]
    assert keys_to_uint64(column(data, "display_url")).tolist() == [4298118681424644510, 14340390157469404125]
    assert column(data, "position") == [3, 1]
    assert column(data, "user_id") == [490234, 0]
    assert len(data.spec.sparse_names) == 10


@pytest.mark.parametrize("file", ["Electronics_5.json", "reviews_Electronics_5.json.gz"])
def test_amazon(file: str, tmp_path: Path) -> None:
    reviews = [
        {"overall": 5.0, "verified": True, "reviewerID": "AAP7PPBU72QFM", "asin": "0151004714", "style": {"F:": "x"}},
        {"reviewerID": "A2E168DTVGE6SV", "asin": "0151004714", "helpful": [0, 2], "overall": 3.0, "summary": "a\nb"},
    ]
    data = named("amazon", tmp_path / file, "".join(json.dumps(review) + "\n" for review in reviews))
    assert (data.spec.dense, data.spec.sparse_names) == ((), ["reviewerID", "asin"])
    assert column(data, "reviewerID") == [fnv1a(b"AAP7PPBU72QFM"), fnv1a(b"A2E168DTVGE6SV")]
    assert column(data, "asin") == [fnv1a(b"0151004714")] * 2
    assert labels(data) == [1, 0]


def test_frappe_as_recbole_has_it(tmp_path: Path) -> None:
    names = ["user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"]
    header = "\t".join(f"{name}:token" for name in names) + "\tcnt:float\tlabel:float\n"
    rows = "0\t4\tmorning\tsunday\tweekend\thome\tfree\tsunny\tUnited States\t0\t1\t1.0\n7\t4" + "\t" * 8 + "\t2\t0.0\n"
    data = named("frappe", tmp_path / "frappe.inter", header + rows)
    assert (data.spec.dense, data.spec.sparse_names) == ((), names)
    assert labels(data) == [1, 0]
    assert column(data, "user") == [0, 7]
    assert column(data, "country") == [fnv1a(b"United States"), MISSING_KEY]


def test_frappe_as_parquet(shared_data: Path) -> None:
    config = yaml.safe_load((CONFIGS / "frappe.yaml").read_text())
    data = TableDataModule(str(shared_data / "frappe" / "test.parquet"), **config["init_args"])
    data.setup("fit")
    assert len(data.spec.sparse_names) == 10
