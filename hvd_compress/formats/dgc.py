"""Format of `compressors.dgc`, and the densities of its warm-up."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..common import checks
from ..common.error_text import error_text
from .registry import register
from .sparse import TopK

# The density of the warm-up's first stage; each next stage has a quarter of it (Lin et al. 2018, section 3.3).
_FIRST_DENSITY = 0.25
# A density within this factor of the final ratio, as 1 / 1024 is of 0.001, counts as the final ratio.
_CLOSE = 1.1


@register
@dataclasses.dataclass(frozen=True)
class DGC(TopK):
    """As top-k; in the warm-up with more elements."""

    name = "dgc"
    examples = ("dgc:ratio=0.01,clipnorm=1", "dgc:ratio=0.01,warmup_epochs=0")
    ratio: float = 0.001
    momentum: float = 0.9
    clipnorm: float | None = None
    warmup_epochs: float | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        momentum = float(checks.integer_or_float("dgc: momentum", self.momentum))
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"dgc: momentum must be from 0 to below 1, got {error_text(self.momentum)}")
        self._set(momentum=momentum)
        if self.clipnorm is not None:
            self._set(clipnorm=checks.integer_or_float("dgc: clipnorm", self.clipnorm))
            if self.clipnorm <= 0.0:
                raise ValueError(f"dgc: clipnorm must be above 0 or None, got {error_text(self.clipnorm)}")
        if self.warmup_epochs is not None:
            self._set(warmup_epochs=checks.integer_or_float("dgc: warmup_epochs", self.warmup_epochs))
            if self.warmup_epochs < 0.0:
                raise ValueError(f"dgc: warmup_epochs must be from 0 on or None, got {error_text(self.warmup_epochs)}")
        if self.steps_per_epoch is not None:
            self._set(steps_per_epoch=checks.integer("dgc: steps_per_epoch", self.steps_per_epoch, 1))

    @functools.cached_property
    def densities(self) -> list[float]:
        """The share of elements that is sent in each stage of the warm-up, and finally `ratio`."""
        warmup = []
        density = _FIRST_DENSITY
        while self.warmup_epochs != 0.0 and density > _CLOSE * self.ratio:
            warmup.append(density)
            density /= 4.0
        return [*warmup, self.ratio]

    @functools.cached_property
    def stages(self) -> tuple[Any, ...]:
        """A compressor without warm-up for each of `densities`."""
        if len(self.densities) == 1:
            return (self,)
        without_warmup = dataclasses.replace(self, warmup_epochs=0, steps_per_epoch=None)
        return tuple(dataclasses.replace(without_warmup, ratio=density) for density in self.densities)

    @property
    def steps_per_count(self) -> int | None:
        """The number of steps in an epoch."""
        return self.steps_per_epoch

    @property
    def epochs_per_stage(self) -> float:
        """How many epochs each stage of the warm-up lasts."""
        stages = len(self.densities) - 1
        return 1.0 if self.warmup_epochs is None or not stages else self.warmup_epochs / stages
