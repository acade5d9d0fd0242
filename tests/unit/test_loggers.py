"""`hvdc.loggers`: what services get, with stand-ins for their packages."""

import math
import sys
from types import SimpleNamespace

import pytest

import hvd_compress as hvdc

VALUES = {
    "hvd_compress/ratio": 3.5,
    "hvd_compress/loss": math.inf,
    "hvd_compress/bucket_0/wire_ms": 1.25,
    "hvd_compress/bucket_dense-0/wire_ms": 0.5,
    "hvd_compress/auto/hybrid:ratio=0.01,bits=4/step_ms": 12.0,
}


def test_prometheus_reads_the_file(tmp_path):
    path = tmp_path / "training.prom"
    log = hvdc.loggers.Prometheus(path, {"job": 'a "b"'})
    log(10, VALUES)
    log(20, {**VALUES, "hvd_compress/ratio": 4.0})
    assert [file.name for file in tmp_path.iterdir()] == ["training.prom"]
    job = 'job="a \\"b\\""'
    assert path.read_text().splitlines() == [
        "# TYPE hvd_compress_last_step gauge",
        f"hvd_compress_last_step{{{job}}} 20",
        "# TYPE hvd_compress_ratio gauge",
        f"hvd_compress_ratio{{{job}}} 4",
        "# TYPE hvd_compress_loss gauge",
        f"hvd_compress_loss{{{job}}} +Inf",
        "# TYPE hvd_compress_bucket_wire_ms gauge",
        f'hvd_compress_bucket_wire_ms{{{job},bucket="0"}} 1.25',
        f'hvd_compress_bucket_wire_ms{{{job},bucket="dense-0"}} 0.5',
        "# TYPE hvd_compress_auto_step_ms gauge",
        f'hvd_compress_auto_step_ms{{{job},compressor="hybrid:ratio=0.01,bits=4"}} 12',
    ]


def test_labels_are_checked():
    with pytest.raises(ValueError, match="labels: 'a-b' is no name of a label"):
        hvdc.loggers.Prometheus("x.prom", {"a-b": "c"})
    with pytest.raises(TypeError, match="path must be the path of a file, got 3"):
        hvdc.loggers.Prometheus(3)


def test_mlflow_gets_names_that_it_takes(monkeypatch):
    logged = []
    package = SimpleNamespace(log_metrics=lambda values, step: logged.append((step, values)))
    monkeypatch.setitem(sys.modules, "mlflow", package)
    hvdc.loggers.MLflow()(7, VALUES)
    ((step, values),) = logged
    assert step == 7 and list(values.values()) == list(VALUES.values())
    assert list(values)[-1] == "hvd_compress/auto/hybrid_ratio_0.01_bits_4/step_ms"


def test_wandb_gets_the_step_as_a_number_of_its_own(monkeypatch):
    logged, metrics = [], []
    run = SimpleNamespace(
        log=logged.append, define_metric=lambda name, step_metric: metrics.append((name, step_metric))
    )
    package = SimpleNamespace(run=None, init=lambda: run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    log = hvdc.loggers.WandB()
    for step in (5, 6):
        log(step, VALUES)
    assert metrics == [("hvd_compress/*", "hvd_compress/step")]
    assert logged == [{**VALUES, "hvd_compress/step": 5}, {**VALUES, "hvd_compress/step": 6}]


@pytest.mark.parametrize("name, package", [("MLflow", "mlflow"), ("WandB", "wandb")])
def test_a_missing_package_is_named(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"hvdc.loggers.{name} needs {package}: pip install {package}"):
        getattr(hvdc.loggers, name)()
