"""Steps that exchange less often, or beside the next step, predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .. import formats
from ..auto.usual_progress import OF_DELAY, of_round
from .models import of_size
from .network import Network
from .prediction import Forecast, forecast, per_progress
from .workload import Workload


@dataclasses.dataclass(frozen=True)
class OtherStep:
    """A step with `local_steps` or `delay`, on average. Times are seconds."""

    compressor: str
    setting: str  # as an argument of the optimizer
    step: float
    sent: float  # bytes that each rank sends
    computing: float  # the share of the step in which the model is trained
    progress: float  # relative to an uncompressed step with an exchange
    per_progress: float  # seconds for the progress of such a step; see `prediction.per_progress`


def other_steps(
    work: Workload, network: Network, ranks: int, specs: Sequence[str], local_steps: Sequence[int]
) -> list[OtherStep]:
    """Each compressor in each step, with `delay=1`, and with these numbers of local steps, whole and in fragments.

    A processor that encodes and decodes does not train meanwhile; what is on its way keeps it from nothing. Then a step
    takes as long as the longer of the two. The exchange at the end of a round of local steps hides behind nothing.
    """
    train = work.backward + work.rest
    found = []
    for spec in specs:
        whole = forecast(spec, work, network, ranks)
        steps = [("", whole.step, float(whole.sent), 1.0)]
        if not formats.parse(spec).model_wide:  # `engine.settings` refuses it
            steps.append(("delay=1", _beside(train, whole), float(whole.sent), OF_DELAY))
        for count in local_steps:
            fragment = forecast(spec, _fragment(work, count), network, ranks)
            rounds = f"local_steps={count}"
            share = of_round(count)
            steps.append((rounds, train + whole.exchange / count, whole.sent / count, share))
            steps.append((f'{rounds}, fragments="stream"', _beside(train, fragment), float(fragment.sent), share))
        found += [
            OtherStep(
                spec, setting, step, sent, train / step, share * whole.progress,
                per_progress(step, share * whole.progress, whole.lost),
            )
            for setting, step, sent, share in steps
        ]  # fmt: skip
    return found


def _beside(train: float, exchanged: Forecast) -> float:
    """Seconds of a step beside which something is exchanged that was known before it."""
    return max(train + exchanged.encode + exchanged.decode, exchanged.exchange)


def _fragment(work: Workload, count: int) -> Workload:
    """What one step exchanges if the model is exchanged once in so many steps."""
    return Workload(tuple(of_size(max(1, work.numel // count))), bucket_bytes=work.bucket_bytes)
