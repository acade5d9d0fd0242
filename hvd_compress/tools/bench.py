"""`hvd-compress bench`: every compressor on this very cluster."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..cost.calibration import COLLECTIVES
from ..engine.layout import LARGEST
from . import console, launch, options, plots, timing, units
from .advice import LEAST_SPEEDUP
from .models import MODELS, of_size
from .network import calibrated
from .prediction import forecast, forecast_auto, per_progress
from .workload import Workload

EXAMPLE = "hvd-compress bench -np 2 --model resnet50"


@click.command(
    epilog=f"""\b
Examples:
  {EXAMPLE} --plot bench.png
  hvd-compress bench -np 4 -H one:1,two:1,three:1,four:1 --params 110M -c none -c int8 --json"""
)
@click.option("--model", type=click.Choice(sorted(MODELS)), help="Whose gradients cross.  [default: resnet50]")
@click.option("--params", type=units.PARAMETERS, help="A model of so many parameters, such as 25.6M, instead.")
@options.compressors
@click.option("--rounds", type=click.IntRange(3), default=9, show_default=True, help="How often each is timed.")
@options.backward
@options.forward
@options.bucket_bytes
@options.output("Write it there as JSON.")
@click.option("--plot", type=plots.PLOT_FILE, help="Draw the times.")
@console.json_option
@launch.workers
def bench(
    model: str | None, params: int | None, specs: tuple[str, ...], rounds: int, backward: float, forward: float,
    bucket_bytes: int, output: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Time the exchange of a model's gradients with every compressor.

    -np starts the workers, and so does horovodrun in front of the command; rank 0 prints. The values are recorded
    gradients of a small transformer and of ResNet-20,
    repeated until they fill the model's shapes. All take turns in each round; medians, of the slowest worker. The
    total is one step's exchange with residuals, without a backward pass that would hide some of it. Encode and
    decode are the kernels' times by themselves; wire is the rest of the total. The error is that of one step alone,
    ||sent - exact|| / ||exact||, before the residual makes up for it. Predicted is what `plan` says with a
    calibration that is made here. `training` and the advice are as in `plan`: give --backward and --forward for those
    of a whole step.
    """
    console.under_horovodrun(EXAMPLE)
    if model is not None and params is not None:
        raise click.UsageError("Give either --model or --params.")
    shapes = of_size(params) if params else MODELS[model or "resnet50"]()
    result = measure(Workload(tuple(shapes), backward, forward, bucket_bytes), options.with_none(specs), rounds)
    if result is None:  # another rank prints
        return
    if output is not None:
        with console.writing(output):
            output.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None:
        plots.bench(plot, result)
    if as_json:
        console.print_json(result)
        return
    out = console.output()
    out.print(_table(result))
    for sentence in advice(result):
        out.print(sentence, soft_wrap=True)
    errors = [abs(row["predicted"] / row["total"]["median"] - 1.0) for row in result["compressors"]]
    out.print(f"The prediction is off by {100 * statistics.median(errors):.0f}% (median).")
    if plot is not None:
        out.print(f"plot: {plot}")


def measure(work: Workload, specs: tuple[str, ...], rounds: int) -> dict[str, Any] | None:
    """What `bench` measures; on rank 0, None on others. A collective call."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from ..cost.calibrate import calibrate
    from ..exchange import hosts
    from .recorded import gradients
    from .timed_exchange import Method, barrier, relative_error, slowest

    hosts.init()
    variables = [tf.Variable(value) for value in gradients(work.shapes, hvd.rank())]
    methods = {spec: Method(spec, variables, work.bucket_bytes) for spec in specs}
    errors: dict[str, float] = {}
    exact: list[Any] = []
    with console.Steps("measuring", 2 * len(specs) + len(COLLECTIVES) + rounds, hvd.rank() == 0) as steps:
        for spec, method in methods.items():  # no compression is the first one
            steps.step(f"first step of {spec}")
            reduced = method.run()
            exact = exact or reduced
            errors[spec] = relative_error(reduced, exact)
            method.run()
        chunk = max(method.chunk for method in methods.values()) or LARGEST
        calibration = calibrate(specs, elements=chunk, watch=steps.step)
        runs = {spec: method.run for spec, method in methods.items()}
        times = timing.interleave(runs, rounds, barrier, lambda: steps.step("rounds"))
        seconds = slowest([times[spec] for spec in specs], "times").tolist()
    if hvd.rank() != 0:
        return None
    network = calibrated(calibration, None)
    totals = {spec: timing.summary(row) for spec, row in zip(specs, seconds)}
    rows: list[dict[str, Any]] = []
    for spec, total in totals.items():
        sent, plain = methods[spec].plan.bytes_sent()
        predicted = forecast(spec, work, network, hvd.size())
        coding = predicted.encode + predicted.decode
        # The backward pass hides the same share of the exchange as predicted.
        step = work.rest + work.backward + predicted.exposed * total["median"] / predicted.exchange
        rows.append({
            "compressor": spec,
            "encode": predicted.encode,
            "wire": max(0.0, total["median"] - coding),
            "decode": predicted.decode,
            "total": total,
            "speedup": totals["none"]["median"] / total["median"],
            "sent": sent,
            "ratio": plain / sent,
            "error": errors[spec],
            "predicted": predicted.exchange,
            "step": step,
            "progress": predicted.progress,
            "per_progress": per_progress(step, predicted.progress, predicted.lost),
        })  # fmt: skip
    for row in rows:
        row["training"] = rows[0]["per_progress"] / row["per_progress"]
    auto = list(dict.fromkeys(spec for _, spec in forecast_auto(work, network, hvd.size()).chosen if spec != "none"))
    return {
        "params": work.numel, "ranks": hvd.size(), "rounds": rounds, "backward": work.backward, "forward": work.rest,
        "compressors": rows, "auto": auto,
    }  # fmt: skip


def _table(result: dict[str, Any]) -> Table:
    rows = []
    for row in result["compressors"]:
        total = {key: units.show_seconds(seconds) for key, seconds in row["total"].items()}
        rows.append({
            "compressor": row["compressor"],
            **{part: units.show_seconds(row[part]) for part in ("encode", "wire", "decode")},
            "total": total["median"],
            "quartiles": f"{total['low']} to {total['high']}",
            "speedup": f"{row['speedup']:.2f}x",
            "sent": units.show_bytes(row["sent"]),
            "ratio": f"{row['ratio']:.3g}",
            "error": f"{row['error']:.2g}" if row["error"] else "",
            "predicted": units.show_seconds(row["predicted"]),
            "progress": f"{row['progress']:.0%}",
            "training": f"{row['training']:.2f}x",
        })  # fmt: skip
    title = f"{units.show_count(result['params'])} parameters, {result['ranks']} ranks, medians of {result['rounds']}"
    return console.table(title, rows)


def advice(result: dict[str, Any]) -> list[str]:
    """What the table comes to: the compressor with which training is the fastest, by the rule of `auto`."""
    none, best = result["compressors"][0], min(result["compressors"], key=lambda row: row["per_progress"])
    step = "a step" if result["backward"] + result["forward"] else "an exchange"
    if best["per_progress"] * LEAST_SPEEDUP >= none["per_progress"]:
        line = "None of these compressors makes training 5% faster on this network."
    else:
        line = (
            f"Take {best['compressor']} on this network: {step} of {units.show_seconds(best['step'])} instead of "
            f"{units.show_seconds(none['step'])} makes {best['progress']:.0%} of the progress. "
            f"Training is {best['training']:.3g} times as fast."
        )
    if step == "an exchange":
        line += " This counts nothing but the exchange: give --backward and --forward, too."
    return [line, f"auto would take {' and '.join(result['auto']) or 'none'}, by the prediction."]
