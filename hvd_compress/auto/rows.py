"""What `auto` saves by compressing the rows of embeddings.

Rows are sent with one compressor (`Auto.for_rows`) or uncompressed. On a fast link, or where there are few of them,
they begin uncompressed: kernels would take longer to trace or compile, and to run, than the link needs for the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..cost import CostModel
from ..engine.embedding_table import EmbeddingTable


class RowSavings:
    """Predicts how much shorter a step is if rows are compressed.

    Args:
        tables: All embeddings of the plan. Those that `auto` does not decide on save nothing.
        model: The calibrated cost model.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], model: CostModel) -> None:
        self._tables, self._model = tables, model

    @property
    def any(self) -> bool:
        """Whether there are rows that may be compressed or not."""
        return any(table.automatic for table in self._tables)

    @property
    def needs_xla(self) -> bool:
        """Whether XLA compiles kernels for rows that are compressed."""
        return any(table.automatic and table.rows.needs_xla for table in self._tables)

    def at_most(self) -> float:
        """Seconds, if each gradient has as many rows as it may have."""
        return self._seconds([table.max_rows for table in self._tables], 1.0)

    def now(self, counts: np.ndarray, link: float) -> float:
        """Seconds, with as many rows as in a step.

        Args:
            counts: `State.embedding_counts` after that step, int64 [embeddings, 3].
            link: Bytes take so many times as long as when `model` was calibrated.
        """
        return self._seconds([rows / self._model.ranks for rows in counts[:, 0].tolist()], link)

    def _seconds(self, rows: Sequence[float], link: float) -> float:
        """With so many rows of each rank, on average."""
        ranks, saved = self._model.ranks, 0.0
        for table, count in zip(self._tables, rows):
            if table.automatic:
                try:
                    kernels = self._model.cost_of(table.compressor)
                except ValueError:
                    return math.inf  # a compressor of the user, which was not measured for rows
                gradient = 4.0 * count * table.columns
                saved += link * (self._exchange(table.uncompressed, count) - self._exchange(table, count))
                saved -= kernels.encoding(gradient) + kernels.decoding(ranks * gradient, 1)
        return saved

    def _exchange(self, table: EmbeddingTable, rows: float) -> float:
        """Seconds on the link, without its burst, which buckets use up.

        With more rows than `most_rows`, the dense gradient is sent, of about that size.
        """
        rows = min(rows, table.most_rows / self._model.ranks)
        return self._model.sustained.allgather(rows * table.rows.nbytes)
