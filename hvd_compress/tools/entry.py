"""Where the command `hvd-compress` starts: `horovod` and `doctor --env` need none of the packages of the extra."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def main() -> None:
    """Runs a subcommand. Only the ones that need click import it."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["horovod"]:
        from ..install import command

        sys.exit(_piped(lambda: command.main(arguments[1:])))
    if arguments[:1] == ["doctor"] and "--env" in arguments:
        from . import env_doctor

        sys.exit(_piped(lambda: env_doctor.main([word for word in arguments[1:] if word != "--env"])))
    from . import cli

    cli.main(prog_name="hvd-compress")


def _piped(run: Callable[[], int]) -> int:
    """The status of `run`; 1, as with click, if nothing reads its output any more, as after `| head`."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    main()
