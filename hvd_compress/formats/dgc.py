"""Format of `compressors.dgc`, and the densities of its warm-up."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any, ClassVar

from ..common.error_text import error_text
from .base import check_integer
from .sparse import TopK

# The density of the warm-up's first stage; each next one has a quarter of it (Lin et al. 2018, section 3.3).
_QUARTER = 0.25
# A last quarter that would be within this factor of the final ratio, as 1 / 1024 is of 0.001, is the final ratio.
_NEAR = 1.1


@dataclasses.dataclass(frozen=True)
class DGC(TopK):
    """As top-k; in the warm-up with more elements."""

    name: ClassVar[str] = "dgc"
    ratio: float = 0.001
    momentum: float = 0.9
    clipnorm: float | None = None
    warmup_epochs: float | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        momentum = float(_number(self.momentum, "momentum"))
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"dgc: momentum must be from 0 to below 1, got {error_text(self.momentum)}")
        object.__setattr__(self, "momentum", momentum)
        if self.clipnorm is not None:
            object.__setattr__(self, "clipnorm", _number(self.clipnorm, "clipnorm"))
            if self.clipnorm <= 0.0:
                raise ValueError(f"dgc: clipnorm must be above 0 or None, got {error_text(self.clipnorm)}")
        if self.warmup_epochs is not None:
            epochs = _number(self.warmup_epochs, "warmup_epochs")
            if epochs < 0.0:
                raise ValueError(f"dgc: warmup_epochs must be from 0 on or None, got {error_text(epochs)}")
            object.__setattr__(self, "warmup_epochs", epochs)
        if self.steps_per_epoch is not None:
            object.__setattr__(
                self, "steps_per_epoch", check_integer(self.steps_per_epoch, "steps_per_epoch", self.name)
            )

    @functools.cached_property
    def densities(self) -> list[float]:
        """The share that is kept in each stage of the warm-up, and at last `ratio`."""
        found = []
        density = _QUARTER
        while self.warmup_epochs != 0.0 and density > _NEAR * self.ratio:
            found.append(density)
            density /= 4.0
        return [*found, self.ratio]

    @functools.cached_property
    def stages(self) -> tuple[Any, ...]:
        """A compressor without warm-up for each of `densities`."""
        if len(self.densities) == 1:
            return (self,)
        return tuple(
            dataclasses.replace(self, ratio=density, warmup_epochs=0, steps_per_epoch=None)
            for density in self.densities
        )

    @property
    def epochs_per_stage(self) -> float:
        """How long each stage of the warm-up lasts."""
        stages = len(self.densities) - 1
        return 1.0 if self.warmup_epochs is None or not stages else self.warmup_epochs / stages


def _number(value: Any, what: str) -> float:
    """`value`, whole numbers as such, so that a spec string shows them in short."""
    wrong = isinstance(value, bool) or not isinstance(value, numbers.Real)
    if wrong or not math.isfinite(value):
        raise ValueError(f"dgc: {what} must be a number, got {error_text(value)}")
    return int(value) if float(value).is_integer() else float(value)
