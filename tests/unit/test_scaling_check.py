"""benchmarks/scaling_check.py: what it predicts of results whose answer is known."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hvd_compress.cost.defaults import CPU
from hvd_compress.tools.models import MODELS
from hvd_compress.tools.network import Network
from hvd_compress.tools.prediction import forecast
from hvd_compress.tools.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import page_tables  # noqa: E402

_spec = importlib.util.spec_from_file_location("scaling_check", ROOT / "benchmarks" / "scaling_check.py")
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)
MNIST = Workload(tuple(MODELS["mnist"]()))


def result(label, seconds, workers=2):
    methods = {name: {"median": value} for name, value in seconds.items()}
    return {
        "benchmark": "exchange", "model": "mnist", "workers": workers, "label": label, "methods": methods,
    }  # fmt: skip


def test_a_prediction_is_compared_with_what_was_measured():
    int8 = forecast("int8", MNIST, Network(1e9, 50e-6), 2).step
    none = forecast("none", MNIST, Network(1e9, 50e-6), 2).step
    half = forecast("none", MNIST, Network(2e9, 50e-6), 2).step
    rows = check.compare(result("1gbit", {"int8": 2 * int8, "horovod none": none, "horovod fp16": half}))
    assert [row.what for row in rows] == ["int8", "horovod none", "horovod fp16"]
    assert [row.error for row in rows] == pytest.approx([-0.5, 0.0, 0.0])
    assert rows[0].where == "mnist, 2 hosts, 1gbit"


def test_hosts_that_share_cores_encode_more_slowly():
    kernels = check.network(1e9, 4).kernels
    assert kernels["quantize"].encode == 2 * CPU.kernels["quantize"].encode
    assert check.network(1e9, 2).kernels == CPU.kernels


def test_hosts_reach_no_more_than_over_an_unshaped_link():
    # 4.8 MB in 38.4 ms are 1 Gbit/s between two ranks.
    seconds = 8e-9 * 4 * MNIST.numel
    assert check.reached(MNIST, 2, seconds) == pytest.approx(1e9)
    fast = result("10gbit", {"none": 1.0})
    alone = check.compare_all([fast])
    (limited,) = check.compare_all([result("unshaped", {"horovod none": seconds}), fast])
    assert limited.predicted == pytest.approx(forecast("none", MNIST, Network(1e9, 50e-6), 2).step)
    assert alone[0].predicted < limited.predicted


def test_what_was_published_is_read_and_predicted():
    data = json.loads((ROOT / "docs" / "results" / "published.json").read_text(encoding="utf-8"))
    rings = check.allreduces(data["onebit_adam"])
    # Sixteen GPUs from eight: (2 * 15 / 16) / (2 * 7 / 8).
    assert rings[0].predicted == pytest.approx(1.89721 * (15 / 16) / (7 / 8))
    assert rings[0].measured == pytest.approx(2.13324)
    topk = check.grace_compressed(data["grace"])[0]
    wire = 7 * 0.08 * 25.56e6 * (8e-9 - 8 / 25e9)
    assert topk.predicted == pytest.approx(8 * 128 / 1459.6 + wire)
    steps = check.horovod(data["horovod"], 0.0)
    alone = 64 / 119.4
    resnet = [row for row in steps if row.what == "ResNet-101"]
    assert all(row.predicted >= alone for row in resnet)
    assert resnet[-1].measured == pytest.approx(alone / 0.90)
    assert len(check.grace(data["grace"])) == 8 and len(check.earlier(data["earlier"])) == 18


def test_tables_go_into_their_places(tmp_path, capsys):
    page = tmp_path / "page.md"
    empty = "a\n\n<!-- table: it's -->\nold\n<!-- end of table -->\n\nb\n"
    page.write_text(empty)
    text = page_tables.markdown(["", "ms"], [["one", r"1\2"]])
    for _ in range(2):
        page_tables.show({"it's": text}, page)
        assert page.read_text() == empty.replace("old", "\n|  | ms |\n|---|---:|\n| one | 1\\2 |\n")
    assert "### it's" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has 0 places for the table 'another'"):
        page_tables.show({"another": text}, page)
