"""How gradients are reduced: the arguments of the optimizer and the tape, checked."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..common import checks, devices
from ..common.error_text import error_text
from ..compressors import Compressor
from ..exchange import hosts
from . import nonfinite
from .layout import BUCKET_BYTES as BUCKET_BYTES
from .layout import MIN_COMPRESS_SIZE as MIN_COMPRESS_SIZE
from .outer import Average, resolve_outer


@dataclasses.dataclass(frozen=True)
class Settings:
    """How gradients are reduced; see `hvdc.DistributedOptimizer` for the meaning of each.

    Raises:
        TypeError: A value is of a wrong type.
        ValueError: A value is not valid, or two contradict each other.
    """

    compressor: Compressor
    name: str = "DistributedOptimizer"
    op: Any = hvd.Average
    gradient_predivide_factor: float = 1.0
    process_set: Any = hvd.global_process_set
    groups: Any = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    scale_local_gradients: bool = True
    min_compress_size: int = MIN_COMPRESS_SIZE
    bucket_bytes: int = BUCKET_BYTES
    error_feedback: bool | None = None
    residual_decay: float = 1.0
    residual_dtype: str = "float32"
    momentum_correction: float = 0.0
    policy: Any = ()  # (pattern, compressor) pairs; see `policies`
    on_nonfinite: str = "propagate"
    hierarchical: bool | str = "auto"
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    delay: int = 0
    delay_warmup: int = 0
    # Whether the optimizer scales each element by the size of its past gradients, as Adam does.
    adaptive: bool = True
    normalized: bool = False  # whether it divides the update of each layer by its norm, as LAMB does
    local_steps: int | None = None  # None: gradients are exchanged, not movements of weights
    outer: Any = "average"  # becomes an `Outer`
    fragments: str | None = None
    alpha: float | None = None  # None becomes 0.5 when streaming, the value of the paper
    local_warmup: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.op, type(hvd.Average)) or self.op not in (hvd.Average, hvd.Sum):
            raise ValueError(f"op currently only supports Average and Sum, got {error_text(self.op)}")
        for name in ("name", "device_dense", "device_sparse"):
            checks.text(name, getattr(self, name))
        checks.process_set(self.process_set)
        self._set_checked("gradient_predivide_factor", checks.number)
        if self.gradient_predivide_factor <= 0.0:
            raise ValueError(f"gradient_predivide_factor must be above 0, got {self.gradient_predivide_factor}")
        if self.gradient_predivide_factor != 1.0 and self.op != hvd.Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        self._set_checked("groups", _checked_groups)
        self._set_checked("min_compress_size", checks.integer, 0)
        self._set_checked("bucket_bytes", checks.integer, 1)
        self._set_checked("residual_decay", checks.number, 0.0, 1.0)
        self._set_checked("momentum_correction", checks.number, 0.0, 1.0)
        self._set_checked("backward_passes_per_step", checks.integer, 0)
        if self.backward_passes_per_step == 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._set_checked("average_aggregated_gradients", checks.flag)
        self._set_checked("sparse_as_dense", checks.flag)
        self._set_checked("scale_local_gradients", checks.flag)
        if self.error_feedback is not None:
            self._set_checked("error_feedback", checks.flag)
        self._set_checked("residual_dtype", _checked_dtype)
        if not isinstance(self.on_nonfinite, str) or self.on_nonfinite not in nonfinite.POLICIES:
            raise ValueError(f"on_nonfinite must be one of {nonfinite.POLICIES}, got {error_text(self.on_nonfinite)}")
        if not isinstance(self.hierarchical, (bool, str)) or self.hierarchical not in hosts.CHOICES:
            raise ValueError(f"hierarchical must be 'auto', True or False, got {error_text(self.hierarchical)}")
        if self.hierarchical is True and self.process_set is not hvd.global_process_set:
            raise ValueError("hierarchical=True needs the global process set: leave process_set out")
        if self.hierarchical is True and self.momentum_correction:
            raise ValueError("hierarchical=True and momentum_correction cannot go together: choose one")
        if self.momentum_correction == 1.0:
            raise ValueError("momentum_correction must be below 1, got 1.0")
        self._set_momentum_of_dgc()
        for compressor in self.compressors:
            # The momentum of dgc also applies to uncompressed gradients.
            may_be_uncompressed = self.dgc is not None or compressor is not self.compressor
            uncompressed = compressor.uncompressed and may_be_uncompressed
            sparse_with_residual = all(stage.sparse and self.feeds_back(stage) for stage in compressor.stages)
            if self.momentum_correction and not uncompressed and not sparse_with_residual:
                whose = "momentum_correction" if self.dgc is None else f"the momentum of {self.dgc.spec}"
                raise ValueError(
                    f"{whose} needs a sparse compressor with a residual, such as topk; "
                    f"{compressor.spec} sends every element every step or keeps no residual"
                )

        self._check_local_steps()
        for count in ("epochs", "training"):
            counting = [c for c in self.compressors if len(c.stages) > 1 and c.counts == count]
            if len({c.steps_per_count for c in counting}) > 1:
                specs = " and ".join(c.spec for c in counting)
                raise ValueError(
                    f"policy: the number of steps in {'an epoch' if count == 'epochs' else count} must be the same for "
                    f"all variables, got {specs}"
                )
        autos = [compressor for compressor in self.compressors if compressor.automatic]
        if any(auto != autos[0] for auto in autos):
            raise ValueError("policy: there can be only one auto, got " + " and ".join(a.spec for a in autos))
        self._check_delay()

    def _check_delay(self) -> None:
        self._set_checked("delay", checks.integer, 0, 1)
        self._set_checked("delay_warmup", checks.integer, 0)
        of_auto = self._of_auto("delay")
        if of_auto:
            if self.delay or self.delay_warmup:
                name = "delay_warmup" if self.delay_warmup else "delay"
                raise ValueError(
                    f"auto:delay and {name}={getattr(self, name)} cannot go together: leave one of them out"
                )
            object.__setattr__(self, "delay", of_auto[-1])
        if not self.delay:
            if self.delay_warmup:
                raise ValueError(f"delay_warmup={self.delay_warmup} needs delay=1")
            return
        if self.local_steps is not None:
            raise ValueError(
                "local_steps and delay=1 cannot go together: fragments='stream' also sends beside the step"
            )
        if self.backward_passes_per_step > 1:
            raise ValueError(
                f"backward_passes_per_step={self.backward_passes_per_step} and delay=1 cannot go together: the "
                "exchange would wait for the last pass; use the optimizer's gradient_accumulation_steps, or delay=0"
            )
        if self.hierarchical is True:
            raise ValueError("hierarchical=True and delay=1 cannot go together: choose one")
        if self.momentum_correction:
            whose = "momentum_correction" if self.dgc is None else self.dgc.spec
            raise ValueError(
                f"{whose} and delay=1 cannot go together: use hybrid:ratio=0.01,bits=4 and Adam, or delay=0"
            )
        for compressor in self.compressors:
            why = ""
            if compressor.automatic and not of_auto:
                why = "its choice changes from step to step, unless it is auto:delay=(0|1)"
            elif len(compressor.stages) > 1:
                why = "its stages have payloads of different sizes"
            elif compressor.model_wide:
                why = "its second exchange depends on its first"
            if why:
                raise ValueError(
                    f"delay=1 does not work with {compressor.spec}: {why}; use a fixed compressor such as int4 or "
                    "hybrid:ratio=0.01,bits=4, or delay=0"
                )

    def _set_momentum_of_dgc(self) -> None:
        """Sets `momentum_correction` to the momentum of dgc, if dgc is used."""
        dgcs = [compressor for compressor in self.compressors if compressor.momentum_settings is not None]
        for name in ("momentum", "clipnorm", "steps_per_epoch"):
            if len({getattr(dgc, name) for dgc in dgcs}) > 1:
                specs = " and ".join(dgc.spec for dgc in dgcs)
                raise ValueError(f"policy: {name} of dgc must be the same for all variables, got {specs}")
        if dgcs:
            if self.momentum_correction not in (0.0, dgcs[0].momentum):
                raise ValueError(
                    f"momentum_correction={self.momentum_correction} and the momentum of {dgcs[0].spec} "
                    f"({dgcs[0].momentum}) are the same thing: leave momentum_correction out"
                )
            object.__setattr__(self, "momentum_correction", dgcs[0].momentum)

    def _check_local_steps(self) -> None:
        """Checks the settings of local steps, which need `local_steps`."""
        if self.alpha is not None:
            self._set_checked("alpha", checks.number, 0.0, 1.0)
        self._set_checked("local_warmup", checks.integer, 0)
        object.__setattr__(self, "outer", resolve_outer(self.outer))
        self._take_lengths_of_auto()
        if self.fragments not in (None, "stream"):
            raise ValueError(f"fragments must be None or 'stream', got {error_text(self.fragments)}")
        if self.local_steps is None:
            for name in self._given_of_rounds():
                raise ValueError(f"{name} belongs to local steps: set local_steps as well, or leave it out")
            return
        self._set_checked("local_steps", checks.integer, 1)
        if self.momentum_correction:
            whose = (
                f"momentum_correction={self.momentum_correction}"
                if self.dgc is None
                else f"the momentum of {self.dgc.spec}"
            )
            raise ValueError(
                f"{whose} and local_steps cannot go together: momentum of movements is that of the outer optimizer, "
                "outer='nesterov:lr=0.7,momentum=0.9', and dgc needs momentum=0"
            )
        if not self.averages:
            raise ValueError("local_steps averages the movements of the ranks: use op=hvd.Average")
        if any(compressor.automatic for compressor in self.compressors) and not self.round_lengths:
            raise ValueError(
                "local_steps needs a named compressor, such as compression='int8', or lengths of rounds for auto to "
                "choose from, such as compression='auto:local_steps=(1|8|32)'"
            )
        if self.fragments is None and self.alpha is not None:
            raise ValueError("alpha mixes weights with fragments='stream' only: set that as well, or leave alpha out")
        if self.fragments is not None and self.local_steps == 1:
            raise ValueError("fragments='stream' needs local_steps of at least 2: one fragment is sent in each step")
        if self.fragments is not None and self.groups is not None:
            raise ValueError("groups and fragments='stream' cannot go together: leave groups out")
        if self.alpha is None and self.fragments is not None:
            object.__setattr__(self, "alpha", 0.5)
        if self.alpha == 1.0:
            raise ValueError("alpha must be below 1: with 1.0, the ranks would never take over each other's weights")

    def _take_lengths_of_auto(self) -> None:
        """With lengths of rounds for `auto` to choose from, `local_steps` becomes the shortest: it begins with that."""
        if not self.round_lengths:
            return
        if self.local_steps is not None:
            raise ValueError(
                f"local_steps={self.local_steps} and the local_steps of auto say both how long a round is: leave one "
                "of them out"
            )
        counts_exchanges = any(len(compressor.stages) > 1 for compressor in self.compressors)
        for name in [*self._given_of_rounds(), *(["policy"] if counts_exchanges else [])]:
            raise ValueError(
                f"auto:local_steps and {name}={getattr(self, name)} cannot go together: leave {name} out, or name a "
                "compressor and one number of local_steps"
            )
        object.__setattr__(self, "local_steps", self.round_lengths[0])

    def _given_of_rounds(self) -> list[str]:
        """The arguments of local steps, besides their number, that are not their defaults."""
        given = {
            "outer": self.outer != Average(),
            "fragments": self.fragments is not None,
            "alpha": self.alpha is not None,
            "local_warmup": self.local_warmup != 0,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def round_lengths(self) -> tuple[int, ...]:
        """The numbers of local steps that `auto` chooses from; empty if it does not."""
        return self._of_auto("local_steps")

    @property
    def chooses_delay(self) -> bool:
        """Whether `auto` decides when the delay begins."""
        return len(self._of_auto("delay")) > 1

    @property
    def takes_candidate(self) -> bool:
        """Whether one candidate takes the place of `auto` in the first step, see `with_candidate`."""
        return bool(self.round_lengths or self._of_auto("delay"))

    def _of_auto(self, name: str) -> tuple[int, ...]:
        return next((tuple(getattr(c, name)) for c in self.compressors if c.automatic), ())

    def with_candidate(self, candidate: Compressor) -> Settings:
        """These settings with a candidate in place of `auto`."""

        def chosen(compressor: Compressor) -> Compressor:
            return candidate if compressor.automatic else compressor

        policy = tuple((pattern, chosen(compressor)) for pattern, compressor in self.policy)
        return dataclasses.replace(self, compressor=chosen(self.compressor), policy=policy)

    def _set_checked(self, name: str, checked: Callable[..., Any], *limits: Any) -> None:
        """Replaces the value of a field by `checked(name, value, *limits)`."""
        object.__setattr__(self, name, checked(name, getattr(self, name), *limits))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """All compressors that may be used: the default one, then those of `policy`."""
        return (self.compressor, *(compressor for _, compressor in self.policy))

    @property
    def dgc(self) -> Any:
        """The first compressor that is Deep Gradient Compression; None if it is not used."""
        return next((c for c in self.compressors if c.momentum_settings is not None), None)

    def counted(self, count: str) -> bool:
        """Whether stages of a compressor are counted in this unit, see `Traits.counts`."""
        return any(len(c.stages) > 1 and c.counts == count for c in self.compressors)

    def steps_per(self, count: str) -> int | None:
        """The number of steps in an epoch or in training, if the user gives it; see `Traits.steps_per_count`."""
        steps = (c.steps_per_count for c in self.compressors if len(c.stages) > 1 and c.counts == count)
        return next((number for number in steps if number is not None), None)

    @property
    def on_gpu(self) -> bool:
        """Whether gradients are compressed on a GPU."""
        return devices.has_gpu() and "cpu" not in self.device_dense.lower()

    @property
    def op_name(self) -> str:
        """Horovod's name of `op`."""
        return "Average" if self.averages else "Sum"

    @property
    def averages(self) -> bool:
        """Whether `op` is Average, and not Sum."""
        return bool(self.op == hvd.Average)

    @property
    def scale(self) -> float:
        """The factor of the sum over the ranks."""
        return self.gradient_predivide_factor / self.process_set.size() if self.averages else 1.0

    def compressor_of(self, path: str) -> Compressor:
        """The compressor of the first pattern of `policy` that matches a variable's path, or the default."""
        matches = (compressor for pattern, compressor in self.policy if fnmatch.fnmatchcase(path, pattern))
        return next(matches, self.compressor)

    def feeds_back(self, compressor: Compressor) -> bool:
        """Whether this compressor keeps residuals (error feedback)."""
        if compressor.uncompressed:
            return False
        return compressor.error_feedback if self.error_feedback is None else self.error_feedback


def _checked_groups(name: str, groups: Any) -> Any:
    if groups is None:
        return None
    if isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups):
        ids: set[int] = set()
        for variable in (variable for group in groups for variable in group):
            if not hasattr(variable, "assign"):
                raise ValueError(f"groups must hold variables, got {error_text(variable)}")
            if id(variable) in ids:
                raise ValueError(f"groups: {error_text(variable)} stands in them twice")
            ids.add(id(variable))
        return groups
    try:
        return checks.integer(name, groups, 1)
    except ValueError:
        raise ValueError(
            f"groups should be a non-negative integer or a list of list of tf.Variable, got {error_text(groups)}"
        ) from None


def _checked_dtype(name: str, dtype: Any) -> str:
    with contextlib.suppress(TypeError, ValueError):
        of_dtype = str(tf.as_dtype(dtype).name)
        if of_dtype in ("float32", "bfloat16"):
            return of_dtype
    raise ValueError(f"{name} must be 'float32' or 'bfloat16', got {error_text(dtype)}")
