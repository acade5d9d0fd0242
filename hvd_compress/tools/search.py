"""What `tune` looks for: settings, proposed by Optuna, in a file from which it goes on."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import formats
from ..engine.layout import BUCKET_BYTES

BUCKETS = tuple(2**20 * size for size in (1, 4, 10, 25, 50))
KINDS = (
    "none", "fp16", "bf16", "quantize", "onebit", "topk", "block_topk", "randomk", "hybrid", "block_sparse", "powersgd",
)  # fmt: skip
BITS = (2, 3, 4, 5, 6, 8)
RATIOS = (0.001, 0.3)
_BLOCKS = (4, 8, 16, 32)
RANKS = (1, 2, 4, 8)
_SEED = 0
_IN_LINE = "in line"
# Tried first: of each idea a strong or a mild one, and what is good in many cases before the rest.
OPENING: tuple[tuple[str, dict[str, float]], ...] = (
    ("quantize", {"bits": 8}),
    ("hybrid", {"ratio": 0.01, "bits": 4}),
    ("quantize", {"bits": 4}),
    ("quantize", {"bits": 2}),
    ("hybrid", {"ratio": 0.05, "bits": 4}),
    ("onebit", {}),
    ("powersgd", {"rank": 4}),
    ("block_topk", {"ratio": 0.01}),
    ("fp16", {}),
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is tried.

    Attributes:
        compression: A spec string.
        bucket_bytes: As in `hvdc.DistributedOptimizer`.
    """

    compression: str
    bucket_bytes: int

    def environment(self) -> dict[str, str]:
        """The variables with which a script takes it."""
        return {"HVD_COMPRESS": self.compression, "HVD_COMPRESS_BUCKET_BYTES": str(self.bucket_bytes)}

    def line(self) -> str:
        """What to write into the script."""
        size = "" if self.bucket_bytes == BUCKET_BYTES else f", bucket_bytes={self.bucket_bytes}"
        return f'hvdc.DistributedOptimizer(optimizer, compression="{self.compression}"{size})'


BASELINE = Setting("none", BUCKET_BYTES)


def price(step: float, is_good: bool, baseline: float) -> float:
    """What Optuna is to make small: seconds of a step, but what loses too much is slower than no compression.

    Args:
        step: Seconds.
        is_good: Whether the loss increased by no more than is allowed.
        baseline: Seconds of a step without compression.
    """
    return step if is_good else step + 2.0 * baseline


def open_study(path: Path) -> Any:
    """The study in this file, or a new one.

    Raises:
        ValueError: The file is something else.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # The opening takes the place of random trials.
            sampler = optuna.samplers.TPESampler(
                seed=_SEED, n_startup_trials=0, multivariate=True, group=True
            )
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, sampler=sampler, study_name="hvd_compress", load_if_exists=True
        )
    except (KeyError, UnicodeDecodeError, ValueError):
        raise ValueError(f"{path} is no study of `hvd-compress tune`: name another file") from None
    return study


def begin(study: Any, kinds: Sequence[str]) -> None:
    """Makes Optuna propose the opening first."""
    for kind, arguments in OPENING:
        if kind in kinds:
            enqueue(study, {"compressor": kind, **arguments, "bucket_bytes": BUCKET_BYTES})


def is_opening(study: Any) -> bool:
    """Whether something that was put in line is still to be tried."""
    import optuna

    return bool(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,)))


def enqueue(study: Any, parameters: dict[str, Any]) -> None:
    """Makes Optuna propose these next, after what waits already, if it has not yet."""
    study.enqueue_trial(parameters, user_attrs={_IN_LINE: True}, skip_if_exists=True)


def put_back(study: Any, trial: Any) -> None:
    """Has a trial that was in line and came to nothing wait again."""
    if trial.user_attrs.get(_IN_LINE):
        study.enqueue_trial(trial.params, user_attrs={_IN_LINE: True})


def propose(trial: Any, kinds: Sequence[str]) -> Setting:
    """The setting of an Optuna trial."""
    kind = trial.suggest_categorical("compressor", list(dict.fromkeys(["none", *kinds])))
    arguments = []
    if kind in ("topk", "block_topk", "randomk", "hybrid", "block_sparse"):
        ratio = trial.suggest_float("ratio", *RATIOS, log=True)
        arguments.append(f"ratio={float(f'{ratio:.2g}')}")
    if kind in ("quantize", "hybrid"):
        arguments.append(f"bits={trial.suggest_categorical('bits', BITS)}")
    if kind == "block_sparse":
        arguments.append(f"block={trial.suggest_categorical('block', _BLOCKS)}")
    if kind == "powersgd":
        arguments.append(f"rank={trial.suggest_categorical('rank', RANKS)}")
    bucket_bytes = trial.suggest_categorical("bucket_bytes", BUCKETS)
    return Setting(formats.parse(f"{kind}:{','.join(arguments)}").spec, bucket_bytes)


def is_maximized(metric: str) -> bool:
    """Whether more of a metric is better, as Keras' callbacks guess from its name."""
    return "acc" in metric or metric.endswith("auc") or "fmeasure" in metric
