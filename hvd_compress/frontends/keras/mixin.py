"""What the distributed optimizers of Keras 2 and Keras 3 share."""

from __future__ import annotations

from typing import Any

from ...engine.compression_report import CompressionReport
from .distribution import Distribution, OptimizerSettings


class DistributedMixin:
    """Adds the distributed state, and the public methods that read it, to a Keras optimizer."""

    _hvdc_settings: OptimizerSettings

    @property
    def _hvdc(self) -> Distribution:
        # Written into __dict__: Keras's __setattr__ would track the object, and save and broadcast its variables.
        if "_hvdc_distribution" not in self.__dict__:
            self.__dict__["_hvdc_distribution"] = Distribution(self._hvdc_settings)
        distribution: Distribution = self.__dict__["_hvdc_distribution"]
        return distribution

    @property
    def _agg_helper(self) -> Any:
        """Horovod's name for the `backward_passes_per_step` helper, which has a `counter`."""
        return self._hvdc.aggregation

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of the variable `var` local to this rank, as Horovod's method does."""
        self._hvdc.register_local_var(var)

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step: with this compression, and with stock Horovod.

        For embeddings with IndexedSlices, the rows of the last step count.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return self._hvdc.reducer.bytes_sent()

    def compression_report(self) -> CompressionReport:
        """The compressor of each bucket; with `compression="auto"` also why it was chosen, and its times.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return self._hvdc.reducer.report()
