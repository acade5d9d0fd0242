"""Outer optimizers of local steps: how the mean movement of the ranks changes the synchronized weights.

The mean movement, synchronized weights minus local weights, is used like a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Union

import tensorflow as tf

from ..common import checks, tracing
from ..common.error_text import error_text
from ..formats.specs import format_spec, parse_arguments


def average(weights: tf.Tensor, delta: tf.Tensor) -> tf.Tensor:
    """The mean of the ranks' weights: w - d."""
    return weights - delta


def nesterov(
    weights: tf.Tensor, delta: tf.Tensor, momentum: tf.Tensor, lr: float, factor: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """SGD with Nesterov momentum: m' = factor * m + d, w' = w - lr * (d + factor * m'). Returns w' and m'."""
    momentum = factor * momentum + delta
    return weights - lr * (delta + factor * momentum), momentum


class OuterUpdate:
    """The state of an outer optimizer for some weights.

    Attributes:
        weights: The synchronized weights.
        variables: The state besides, equal on all ranks, by name.
    """

    def __init__(self, weights: Sequence[tf.Variable], variables: dict[str, Any]) -> None:
        self.weights = weights
        self.variables = variables

    def apply(self, deltas: Sequence[tf.Tensor]) -> None:
        """Changes the weights by the mean movements."""
        for weight, delta in zip(self.weights, deltas):
            weight.assign(average(weight, delta))


class _NesterovUpdate(OuterUpdate):
    def __init__(self, weights: Sequence[tf.Variable], lr: float, factor: float) -> None:
        momenta = [tracing.variable(tf.zeros_like(weight), "outer_momentum") for weight in weights]
        super().__init__(weights, {f"momentum_{i}": momentum for i, momentum in enumerate(momenta)})
        self._lr, self._factor, self._momenta = lr, factor, momenta

    def apply(self, deltas: Sequence[tf.Tensor]) -> None:
        for weight, delta, momentum in zip(self.weights, deltas, self._momenta):
            new_weight, new_momentum = nesterov(weight, delta, momentum, self._lr, self._factor)
            weight.assign(new_weight)
            momentum.assign(new_momentum)


class _KerasUpdate(OuterUpdate):
    def __init__(self, weights: Sequence[tf.Variable], optimizer: Any) -> None:
        self._optimizer = type(optimizer).from_config(optimizer.get_config())  # the user's own has no state
        self._optimizer.build(list(weights))
        variables = self._optimizer.variables
        variables = list(variables() if callable(variables) else variables)
        super().__init__(weights, {f"keras_{i}": variable for i, variable in enumerate(variables)})

    def apply(self, deltas: Sequence[tf.Tensor]) -> None:
        if self.weights:  # a fragment may hold statistics only
            self._optimizer.apply_gradients(list(zip(deltas, self.weights)))


@dataclasses.dataclass(frozen=True)
class Average:
    """The synchronized weights become the mean of the ranks' weights (local SGD, Stich 2019, arXiv 1805.09767)."""

    @property
    def spec(self) -> str:
        """The spec string."""
        return "average"

    def __str__(self) -> str:
        return self.spec

    def begin(self, weights: Sequence[tf.Variable]) -> OuterUpdate:
        """The update of these weights."""
        return OuterUpdate(weights, {})


@dataclasses.dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum on the mean movement (DiLoCo, Douillard et al. 2023, arXiv 2311.08105).

    Attributes:
        lr: The outer learning rate, above 0.
        momentum: The factor of the momentum, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", checks.number("lr of the outer optimizer nesterov", self.lr, 0.0))
        momentum = checks.number("momentum of the outer optimizer nesterov", self.momentum, 0.0, 1.0)
        object.__setattr__(self, "momentum", momentum)
        if self.lr == 0.0 or self.momentum == 1.0:
            raise ValueError(f"the outer optimizer nesterov needs lr above 0 and momentum below 1, got {self.spec}")

    @property
    def spec(self) -> str:
        """The spec string."""
        return format_spec("nesterov", {"lr": self.lr, "momentum": self.momentum})

    def __str__(self) -> str:
        return self.spec

    def begin(self, weights: Sequence[tf.Variable]) -> OuterUpdate:
        """The update of these weights, with momenta of zero."""
        return _NesterovUpdate(weights, self.lr, self.momentum)


@dataclasses.dataclass(frozen=True, eq=False)
class KerasOuter:
    """A Keras optimizer that gets the mean movements as gradients.

    Attributes:
        optimizer: Only its configuration is used: each `begin` makes another optimizer from it.
    """

    optimizer: Any

    @property
    def spec(self) -> str:
        """A text that is equal for equal configurations."""
        config = {key: value for key, value in sorted(self.optimizer.get_config().items()) if key != "name"}
        return f"{type(self.optimizer).__name__}({config})"

    def __str__(self) -> str:
        return self.spec

    def begin(self, weights: Sequence[tf.Variable]) -> OuterUpdate:
        """The update of these weights, with the state of a new optimizer."""
        return _KerasUpdate(weights, self.optimizer)


Outer = Union[Average, Nesterov, KerasOuter]


def resolve_outer(outer: Any) -> Outer:
    """The outer optimizer that a user means by "average", "nesterov:lr=0.7,momentum=0.9" or a Keras optimizer.

    Raises:
        TypeError: It is none of these.
        ValueError: A text does not parse, or a value in it is not valid.
    """
    if isinstance(outer, (Average, Nesterov, KerasOuter)):
        return outer
    if isinstance(outer, str):
        name = outer.strip().partition(":")[0].strip()
        if name == "average":
            parse_arguments(outer, (), "outer optimizer")
            return Average()
        if name == "nesterov":
            return Nesterov(**parse_arguments(outer, ("lr", "momentum"), "outer optimizer"))
    elif not isinstance(outer, type) and all(hasattr(outer, a) for a in ("apply_gradients", "get_config", "build")):
        return KerasOuter(outer)
    error = ValueError if isinstance(outer, str) else TypeError
    raise error(
        f"outer must be 'average', 'nesterov:lr=0.7,momentum=0.9' or a Keras optimizer, got {error_text(outer)}"
    )
