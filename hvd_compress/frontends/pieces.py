"""What local steps exchange: fragments of the model, of which each holds pieces of variables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..common.names import path_of
from ..engine.fragments import Rows
from ..engine.outer import OuterUpdate


class LocalVariable:
    """A variable whose values differ between ranks within a round.

    Attributes:
        given: The user's variable, of Keras or TensorFlow.
        value: The `tf.Variable` in it.
        is_statistic: Whether it is only averaged, such as the moving mean of batch normalization.
    """

    def __init__(self, given: Any, value: tf.Variable, is_statistic: bool = False) -> None:
        self.given, self.value, self.is_statistic = given, value, is_statistic


class Piece:
    """Some rows of a variable. To the reducer, it is a variable by itself, with the path of the whole.

    Attributes:
        path: The variable's path.
        shape: The piece's shape.
        dtype: The variable's dtype.
        is_statistic: As in `LocalVariable`.
    """

    def __init__(self, variable: LocalVariable, rows: Rows) -> None:
        shape = tuple(variable.value.shape.as_list())
        self._variable = variable.value
        self._rows = None if not shape or (rows.start, rows.stop) == (0, shape[0]) else rows
        self.path = path_of(variable.given)
        self.shape = shape if self._rows is None else (rows.stop - rows.start, *shape[1:])
        self.dtype = variable.value.dtype
        self.is_statistic = variable.is_statistic
        # The variable itself where that is possible: `groups` and errors refer to it.
        self.reduced_as = variable.given if self._rows is None else self

    def read(self) -> tf.Tensor:
        """The local weights."""
        if self._rows is None:
            return self._variable.read_value()
        return self._variable[self._rows.start : self._rows.stop]

    def assign(self, value: tf.Tensor) -> None:
        """Changes the local weights."""
        if self._rows is None:
            self._variable.assign(value)
        else:
            self._variable[self._rows.start : self._rows.stop].assign(value)


@dataclasses.dataclass(frozen=True)
class Fragment:
    """What is exchanged together."""

    pieces: Sequence[Piece]  # trained ones first, then statistics
    synchronized: Sequence[tf.Variable]  # of each piece
    outer: OuterUpdate  # of the trained pieces

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(math.prod(piece.shape) for piece in self.pieces)

    def movements(self) -> list[tf.Tensor]:
        """Synchronized minus local weights, for each piece."""
        return [own.read_value() - piece.read() for own, piece in zip(self.synchronized, self.pieces)]
