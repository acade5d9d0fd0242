"""Where the command `hvd-compress` starts: `horovod` and `doctor --env` need none of the packages of the extra."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs a subcommand. Only the ones that need click import it."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["horovod"]:
        from ..install import command

        sys.exit(command.main(arguments[1:]))
    if arguments[:1] == ["doctor"] and "--env" in arguments:
        from . import env_doctor

        sys.exit(env_doctor.main([word for word in arguments[1:] if word != "--env"]))
    from . import cli

    cli.main(prog_name="hvd-compress")


if __name__ == "__main__":
    main()
