"""`hvdc.LocalSteps`, for custom training loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..common import checks
from ..common.error_text import error_text
from ..compressors.resolve import CompressionLike
from ..engine.compression_report import CompressionReport
from ..engine.settings import MIN_COMPRESS_SIZE
from .build import new_reducer
from .keras import optimizer_state
from .pieces import LocalVariable
from .rounds import Rounds
from .shared import settings_from


class LocalSteps:
    """Lets each rank train by itself, and averages the weights of all ranks every `local_steps` steps.

    Each rank steps its own optimizer with its own gradients. At the end of a round, the ranks exchange what their
    weights have moved since the last time, compressed, and an outer optimizer applies the mean movement to the
    synchronized weights, with which all ranks continue. See docs/local-steps.md.

    Create it on all ranks, outside of tf.function, when all variables exist: it copies the weights of the first rank to
    all others. Call it once per step, after the optimizer's update, inside tf.function or outside.

    Example:
        sync = hvdc.LocalSteps(model, local_steps=30, compression="int4", outer="nesterov:lr=0.7,momentum=0.9")

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            sync()

    Args:
        variables: The variables that are trained, or a Keras model: its trainable variables, and its moving statistics
            (batch normalization), which are averaged.
        local_steps: As of `hvdc.DistributedOptimizer`, but required, except with `auto:local_steps`.
        outer: As of `hvdc.DistributedOptimizer`, like all arguments below except `averaged`.
        fragments: See there.
        alpha: See there.
        local_warmup: See there.
        averaged: More variables of floating-point type, which are averaged at each exchange, whatever `outer` is.
        compression: See there.
        process_set: See there.
        min_compress_size: See there.
        bucket_bytes: See there.
        error_feedback: See there.
        residual_decay: See there.
        residual_dtype: See there.
        policy: See there.
        on_nonfinite: What to do if the movement of any rank is infinite or NaN. "propagate": the weights become so on
            all ranks. "skip": all ranks go back to the synchronized weights. "raise": all ranks raise
            `tf.errors.InvalidArgumentError`.
        hierarchical: See there.
        name: Prefix of the names of operations.

    Raises:
        TypeError: `variables` holds something else than variables, or an argument is of a wrong type.
        ValueError: An argument is not valid, two arguments contradict each other, or the model is not built. On all
            ranks: they disagree about settings or variables.
    """

    def __init__(
        self,
        variables: Any,
        *,
        local_steps: int | None = None,
        outer: Any = "average",
        fragments: str | None = None,
        alpha: float | None = None,
        local_warmup: int = 0,
        averaged: Sequence[Any] = (),
        compression: CompressionLike = None,
        process_set: Any = hvd.global_process_set,
        min_compress_size: int = MIN_COMPRESS_SIZE,
        bucket_bytes: int | None = None,
        error_feedback: bool | None = None,
        residual_decay: float = 1.0,
        residual_dtype: str = "float32",
        policy: Mapping[str, CompressionLike] | None = None,
        on_nonfinite: str = "propagate",
        hierarchical: bool | str = "auto",
        name: str = "LocalSteps",
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "variables", "averaged")}
        settings = settings_from({"groups": None, "num_groups": 0, **arguments}, name)
        if settings.local_steps is None:
            raise ValueError("LocalSteps needs local_steps, the number of steps in a round, such as 8")
        statistics = list(averaged)
        if hasattr(type(variables), "trainable_variables"):  # a model of Keras 2 has none before it is built
            if not variables.built:
                raise ValueError("LocalSteps needs the model's variables: build it first, model.build(input_shape)")
            statistics = [*optimizer_state.moving_statistics(variables), *statistics]
            variables = variables.trainable_variables
        both = [*checks.items("variables", variables), *statistics]
        for variable in both:
            if not isinstance(optimizer_state.tf_variable(variable), tf.Variable):
                raise TypeError(f"LocalSteps needs variables, or a Keras model, got {error_text(variable)}")
        if not len(both) - len(statistics):
            raise ValueError("LocalSteps got no variables to train")
        self._rounds = Rounds(settings, new_reducer(settings))
        count = len(both) - len(statistics)
        self._variables = [
            LocalVariable(v, optimizer_state.tf_variable(v), is_statistic=i >= count) for i, v in enumerate(both)
        ]
        self._rounds.reducer.of_optimizer = lambda: {"the number of variables to train": str(count)}
        self.start()

    @checks.not_converted
    def __call__(self) -> None:
        """Ends a step, after the optimizer's update; at the end of a round, all ranks exchange their movements.

        Raises:
            ValueError: The ranks disagree about settings or variables.
            RuntimeError: Called inside a function that is compiled with `jit_compile=True`.
        """
        self._rounds.step()

    def start(self) -> None:
        """Begins a round with the weights of the first rank on all ranks.

        Call it on all ranks after the weights were changed by something else than training, such as a checkpoint.

        Raises:
            ValueError: On all ranks: they disagree about settings or variables.
        """
        group = self._rounds.settings.process_set
        if group.included() and group.size() > 1:
            values = [variable.value for variable in self._variables]
            self._rounds.reducer.agree(values, [variable.given for variable in self._variables])
            root = 0 if group is hvd.global_process_set else group.ranks[0]
            optimizer_state.broadcast(values, root, f"{self._rounds.reducer.name}_start", group)
        self._rounds.prepare(self._variables)
        self._rounds.adopt()

    def synchronize(self) -> None:
        """Ends the round now: the ranks exchange what their weights have moved so far. All ranks call it."""
        self._rounds.synchronize()

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """In this context, the variables hold the synchronized weights, for evaluation and saving.

        These are the weights of the last exchange, equal on all ranks. It communicates nothing.
        """
        self._rounds.show_synchronized()
        try:
            yield
        finally:
            self._rounds.show_own()

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step, on average over a round; and with stock Horovod in each step.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return self._rounds.bytes_sent()

    def compression_report(self) -> CompressionReport:
        """The compressor of each bucket of movements.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return self._rounds.report()
