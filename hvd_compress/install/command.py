"""`hvd-compress horovod`: builds, installs, or checks Horovod. Uses the standard library only."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import horovod, prerequisites
from .environment import Environment, SetupError, say
from .recipe import HOROVOD, PYTHONS, Features

DESCRIPTION = f"""\
Horovod {HOROVOD} for the TensorFlow of this Python environment. It is a source package. Its source is changed in a
few places before it is built (docs/install.md). The wheel is built once and kept in the cache directory."""
# What `check` runs on two ranks. Each rank contributes another number, so that the sum shows that all took part.
TWO_RANKS = """
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
total = hvd.allreduce(tf.fill([1000], float(hvd.rank() + 1)), op=hvd.Sum)
assert hvd.size() == 2 and (total.numpy() == 3.0).all(), total
if hvd.rank() == 0:
    built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, name + "_built")()]
    print("TensorFlow", tf.__version__ + ", built with", ", ".join(built))
"""
_CHECK_SECONDS, _END_SECONDS = 300, 10


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(prog="hvd-compress horovod", description=DESCRIPTION)
    commands = main.add_subparsers(dest="command", metavar="install | wheel | check", required=True)
    features = argparse.ArgumentParser(add_help=False)
    features.add_argument("--mpi", action="store_true", help="also for MPI (horovodrun --mpi, mpirun)")
    features.add_argument("--nccl", action="store_true", help="GPU operations by NCCL; needs the CUDA toolkit")
    features.add_argument("--nccl-home", metavar="DIR", default="", help="the folder with NCCL's include/ and lib/")
    features.add_argument("--pytorch", action="store_true", help="also for the PyTorch of this environment")
    commands.add_parser(
        "install", parents=[features], help="build it, unless the cache has the wheel, and install it",
        epilog="Example: hvd-compress horovod install",
    )  # fmt: skip
    wheel = commands.add_parser(
        "wheel", parents=[features], help="build the wheel, to install it on other machines of this kind",
        epilog="Example: hvd-compress horovod wheel -o wheels",
    )  # fmt: skip
    wheel.add_argument("-o", "--output", metavar="DIR", default=".", help="where it is put (default: %(default)s)")
    commands.add_parser("check", help="sum numbers between two ranks, and say what this Horovod was built with")
    return main


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status: 0, or 1 if something is missing or failed (2 for wrong usage)."""
    args = parser().parse_args(arguments)
    cache = horovod.cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        env = Environment.this(cache / "horovod.log")
        if args.command == "check":
            return check(env)
        env.log.write_text("", encoding="utf-8")
        require_tensorflow(env)
        cuda = prerequisites.cuda_home() if args.nccl else ""
        nccl = prerequisites.nccl_home(args.nccl_home, cuda) if args.nccl else args.nccl_home
        features = Features(args.mpi, args.nccl, args.pytorch, nccl or args.nccl_home, cuda)
        if args.command == "wheel":
            return wheel(env, features, Path(args.output))
        return install(env, features)
    except (SetupError, OSError) as problem:
        for line in str(problem).splitlines():
            print(f"hvd-compress horovod: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hvd-compress horovod: interrupted", file=sys.stderr)
        return 1


def require_tensorflow(env: Environment) -> None:
    """Raises SetupError if there is no TensorFlow, or one that is too old; says so if it is a newer one."""
    known = [tuple(map(int, minor.split("."))) for minor in PYTHONS]
    if not env.tf:
        raise SetupError(f"there is no TensorFlow in the environment of {env.python}: pip install tensorflow")
    found = tuple(map(int, env.minor.split(".")))
    if found < known[0]:
        raise SetupError(f"TensorFlow {env.tf} is too old: hvd_compress needs 2.15 or later")
    if found > known[-1]:
        say(f"Note: nobody has tried TensorFlow {env.tf} yet, the newest that is known to work is {list(PYTHONS)[-1]}")


def install(env: Environment, features: Features) -> int:
    """Installs Horovod, unless the one that is there works."""
    this = f"Horovod {HOROVOD} for TensorFlow {env.tf}"
    if is_ours(env, features):
        say(f"{this} is installed and works")
        return 0
    if not horovod.kept_wheel(env, features):
        horovod.require(env, features)  # before anything is installed
    env.pip("install", *features.needs())
    horovod.install(env, features)
    say(f"{this} is installed. Try it on two ranks: hvd-compress horovod check")
    return 0


def is_ours(env: Environment, features: Features) -> bool:
    """Whether Horovod is there, built for this TensorFlow and these features, and starts."""
    tested = f"; from importlib.metadata import version; assert version('horovod') == {HOROVOD!r}"
    # Horovod compares the versions of TensorFlow when it is used; this is where it keeps that of its build.
    built_for = "; import json, pathlib, horovod; built = pathlib.Path(horovod.__file__).with_name('metadata.json')"
    built_for += f"; assert json.loads(built.read_text())['tensorflow'] == {env.tf!r}"
    return env.run([str(env.python), "-c", features.check() + tested + built_for])


def wheel(env: Environment, features: Features, directory: Path) -> int:
    """Puts the wheel into a directory."""
    kept = horovod.kept_wheel(env, features)
    if kept is None:
        horovod.require(env, features)
        with tempfile.TemporaryDirectory(prefix="hvd_compress-") as work:
            horovod.keep(horovod.build(env, Path(work), features), horovod.wheel_directory(env, features))
        kept = horovod.kept_wheel(env, features)
    if kept is None:
        raise SetupError(f"the wheel could not be kept in {horovod.cache_directory()}: set XDG_CACHE_HOME")
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept, directory / kept.name)
    python = "{}.{}".format(*env.version)
    say(f"{directory / kept.name}: for TensorFlow {env.tf}, Python {python} and processors like this one")
    say(f"There: pip install {' '.join(features.needs())} && pip install --no-deps {kept.name}")
    return 0


def check(env: Environment) -> int:
    """Runs an allreduce on two ranks of this host, and says what works."""
    with tempfile.TemporaryDirectory(prefix="hvd_compress-") as work:
        script = Path(work, "two_ranks.py")
        script.write_text(TWO_RANKS, encoding="utf-8")
        launcher = [str(env.python), "-m", "horovod.runner.launch", "-np", "2", str(env.python), str(script)]
        caller = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **caller}
        environment["PATH"] = os.pathsep.join([str(env.python.parent), os.environ.get("PATH", os.defpath)])
        process = subprocess.Popen(
            launcher, cwd=work, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=_CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            raise SetupError(f"two ranks did not find each other within {_CHECK_SECONDS} s: is this host's own name in "
                             "/etc/hosts, and does a firewall leave its own addresses alone?") from None  # fmt: skip
        finally:
            end(process)
    env.log.write_text(output, encoding="utf-8")
    built = [line.partition("TensorFlow ")[2] for line in output.splitlines() if "<stdout>:TensorFlow" in line]
    if process.returncode or not built:
        raise SetupError(f"{reason(output)}; details in {env.log}")
    say(f"Horovod works between two ranks: TensorFlow {built[0]}")
    return 0


def end(process: subprocess.Popen[str]) -> None:
    """Ends a launcher, which leads a session of its own, and what it has started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if process.poll() is None:
            process.terminate()  # horovodrun ends its ranks
            process.communicate(timeout=_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reason(output: str) -> str:
    """Why a check failed, as far as its output says, and what to do."""
    if "No module named" in output and "horovod" in output.rpartition("No module named")[2][:30]:
        return "there is no Horovod in this environment: hvd-compress horovod install"
    if "No module named 'tensorflow'" in output:
        return "there is no TensorFlow in this environment: pip install tensorflow"
    for sign in ("undefined symbol", "cannot open shared object", "has not been built", "installed with version"):
        if sign in output:
            return f"this Horovod was built for another TensorFlow ({sign}): hvd-compress horovod install"
    errors = [line.partition(">:")[2] or line for line in output.splitlines() if "Error" in line]
    return f"the two ranks failed ({errors[-1].strip()[:200] if errors else 'no message'})"
