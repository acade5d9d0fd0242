"""The command line: which subcommands there are.

A subcommand is a click command in a file of its own, which imports what is slow (TensorFlow, matplotlib, Optuna)
inside the function only, takes `console.json_option`, and ends with status 0 (all is well), 1 (it found a
problem, or failed: click.ClickException) or 2 (wrong usage: click.BadParameter, click.UsageError).
"""

from __future__ import annotations

import sys

try:
    import click
    import rich  # noqa: F401
except ImportError as error:
    sys.exit(
        "hvd-compress: `horovod` and `doctor --env` work as it is; for the other commands, "
        f"which need {error.name}: pip install 'hvd_compress[tools]'"
    )

from ..version import __version__
from . import bench, calibrate, compare, doctor, horovod, plan, report, tune

COMMANDS = (
    horovod.horovod, plan.plan, calibrate.calibrate, bench.bench, compare.compare, tune.tune, doctor.doctor,
    report.report,
)  # fmt: skip


@click.group(commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="hvd-compress")
def main() -> None:
    """Gradient compression for Horovod: predict, measure, and tune it on your network.

    --help shows an example of each subcommand. All but `horovod` have --json for scripts. The exit status is 0 if all
    is well, 1 if a problem was found or something failed, 2 for wrong usage.
    """


if __name__ == "__main__":
    main(prog_name="hvd-compress")
