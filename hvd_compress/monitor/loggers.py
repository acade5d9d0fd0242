"""`hvdc.loggers`: what `CompressionMonitor(log=...)` measures, for services that keep the metrics of trainings."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common import checks

# The names of numbers that are of a bucket, or of a compressor that `auto` may choose.
_OF_BUCKET = re.compile(r"hvd_compress/bucket_([^/]+)/(\w+)")
_OF_COMPRESSOR = re.compile(r"hvd_compress/auto/(.+)/(\w+)")


def _imported(package: str, who: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"hvdc.loggers.{who} needs {package}: pip install {package} ({error})") from None


class MLflow:
    """Logs to MLflow: to the active run, or to a new one.

    Characters that MLflow refuses in names, as in `hybrid:ratio=0.01`, become underscores.

    Example:
        hvdc.callbacks.CompressionMonitor("runs/1", log=hvdc.loggers.MLflow())

    Raises:
        ImportError: MLflow is not installed.
    """

    def __init__(self) -> None:
        self._mlflow = _imported("mlflow", "MLflow")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the numbers of a step."""
        self._mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", name): x for name, x in values.items()}, step=step)


class WandB:
    """Logs to Weights & Biases: to the current run, or to a new one of `wandb.init()`.

    The numbers are plotted against `hvd_compress/step`, because W&B's own step counts all calls of `wandb.log`. With
    `WANDB_MODE=offline`, W&B needs no network.

    Example:
        hvdc.callbacks.CompressionMonitor("runs/1", log=hvdc.loggers.WandB())

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self) -> None:
        self._wandb = _imported("wandb", "WandB")
        self._run: Any = None

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the numbers of a step."""
        if self._run is None:
            self._run = self._wandb.run or self._wandb.init()
            self._run.define_metric("hvd_compress/*", step_metric="hvd_compress/step")
        self._run.log({**values, "hvd_compress/step": step})


class Prometheus:
    """Writes a text file for Prometheus, as its node exporter's textfile collector reads them.

    The file holds the numbers of the last call, as gauges: `hvd_compress_exchange_ms 12.3`, and with labels those of
    each bucket, `hvd_compress_bucket_wire_ms{bucket="0"} 4.5`, and of each compressor that `auto` may choose. It is
    written under another name and then renamed, so that it is always complete. It stays as it is after training.

    Example:
        log = hvdc.loggers.Prometheus("/var/lib/node_exporter/training.prom")
        hvdc.callbacks.CompressionMonitor("runs/1", update_freq=100, log=log)

    Args:
        path: The file, in the collector's directory. The collector reads names that end in `.prom`.
        labels: Labels of all numbers, such as `{"job": "bert"}`. Two trainings on one host need different ones.

    Raises:
        TypeError: `path` is not a path.
        ValueError: A name of a label is not valid.
    """

    def __init__(self, path: str | os.PathLike, labels: Mapping[str, str] | None = None) -> None:
        self._path = Path(checks.path("path", path, "file"))
        self._labels = dict(labels or {})
        for name in self._labels:
            if not re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII):
                raise ValueError(f"labels: {name!r} is no name of a label: use letters, digits and underscores")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the numbers of a step.

        Raises:
            OSError: The file cannot be written.
        """
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.write_text(self._text({"hvd_compress/last_step": step, **values}), encoding="utf-8")
        os.replace(temporary, self._path)

    def _text(self, values: Mapping[str, float]) -> str:
        samples: dict[str, list[str]] = {}  # by metric: the samples of one must follow each other
        for name, value in values.items():
            of_bucket, of_compressor = _OF_BUCKET.fullmatch(name), _OF_COMPRESSOR.fullmatch(name)
            labels = dict(self._labels)
            if of_bucket:
                labels["bucket"], name = of_bucket.group(1), f"hvd_compress_bucket_{of_bucket.group(2)}"
            elif of_compressor:
                labels["compressor"], name = of_compressor.group(1), f"hvd_compress_auto_{of_compressor.group(2)}"
            metric = re.sub(r"\W", "_", name, flags=re.ASCII)
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            samples.setdefault(metric, []).append(f"{metric}{f'{{{inside}}}' if inside else ''} {_number(value)}\n")
        return "".join(f"# TYPE {metric} gauge\n{''.join(lines)}" for metric, lines in samples.items())


def _escaped(text: str) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0.0 else "-Inf"
    return f"{value:.10g}"
