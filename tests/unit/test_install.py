"""hvd-compress horovod: what is checked, built, kept and said; with stand-ins for compilers and pip."""

import io
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path
from platform import libc_ver

import pytest

from hvd_compress.install import command, environment, horovod, prerequisites, progress, recipe
from hvd_compress.install.environment import Environment, SetupError
from hvd_compress.install.recipe import PLAIN, Features

ROOT = Path(__file__).resolve().parents[2]


def executable(path, text):
    """A shell script at this path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is all of PATH, and a machine that names neither CUDA nor NCCL nor a compiler."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(prerequisites, "USUAL_CUDA", str(tmp_path / "none"))
    for name in (*prerequisites.CUDA_HOMES, "HOROVOD_NCCL_HOME", "NCCL_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return folder


class TestPrerequisites:
    def test_nothing_is_there(self, tools):
        lines = prerequisites.missing(Features(mpi=True, nccl=True, pytorch=True, nccl_home="/nowhere"))
        assert lines[0] == "no g++ and make found, which Horovod's build needs: apt-get install g++ make"
        assert [line.split(":")[0] for line in lines[1:]][:2] == ["--mpi", "--pytorch"]
        assert any("no mpicxx" in line for line in lines) and any("no nvcc" in line for line in lines)
        assert any("nccl.h and lib/libnccl.so in /nowhere" in line for line in lines)
        assert all("\n" not in line for line in lines)

    def test_everything_is_there(self, tools, tmp_path, monkeypatch):
        for name in ("g++", "make", "mpicxx"):
            executable(tools / name, "exit 0\n")
        executable(tmp_path / "cuda" / "bin" / "nvcc", "exit 0\n")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        nccl = tmp_path / "nccl"
        for file in ("include/nccl.h", "lib64/libnccl.so"):
            (nccl / file).parent.mkdir(parents=True)
            (nccl / file).write_text("")
        assert prerequisites.missing(Features(mpi=True, nccl=True, nccl_home=str(nccl))) == []
        assert prerequisites.cuda_home() == str(tmp_path / "cuda")
        (nccl / "lib64" / "libnccl.so").unlink()
        (line,) = prerequisites.missing(Features(nccl=True, nccl_home=str(nccl)))
        assert "libnccl.so" in line

    def test_an_old_compiler_is_named(self, tools):
        executable(tools / "make", "exit 0\n")
        executable(tools / "g++", "exit 1\n")
        (line,) = prerequisites.missing(PLAIN)
        assert line.startswith("g++ cannot compile C++17")

    def test_a_host_without_an_address_is_named(self, monkeypatch):
        """Horovod asks for the address of its host, and ends the process if there is none."""
        monkeypatch.setattr(horovod.socket, "gethostname", lambda: "no-such-host.invalid")
        with pytest.raises(SetupError, match=r"no-such-host\.invalid has no address"):
            horovod.install(None)

    @pytest.mark.parametrize(("version", "needed"), [("3.12.4", True), ("3.13.0", False), ("4.1.2", False)])
    def test_cmake_from_pypi_where_the_machine_has_none(self, tools, version, needed):
        assert prerequisites.needs_cmake()
        executable(tools / "cmake", f"echo cmake version {version}\n")
        assert prerequisites.needs_cmake() == needed


OPERATIONS = """
  {
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    state.process_set_table.Initialize(global_gloo_context);
  }

    horovod_global.initialization_done = false;
    horovod_global.background_thread =
        std::thread(BackgroundThreadLoop, std::ref(horovod_global));
"""


class TestRecipe:
    def test_variables(self):
        plain = PLAIN.variables()
        assert plain["HOROVOD_WITH_TENSORFLOW"] == plain["HOROVOD_WITH_GLOO"] == "1"
        assert plain["HOROVOD_WITHOUT_MPI"] == plain["HOROVOD_WITHOUT_PYTORCH"] == "1"
        full = Features(mpi=True, nccl=True, pytorch=True, nccl_home="/n", cuda_home="/c").variables()
        assert not [name for name in full if "WITHOUT" in name and "MXNET" not in name]
        assert (full["HOROVOD_GPU_OPERATIONS"], full["HOROVOD_NCCL_HOME"], full["HOROVOD_CUDA_HOME"]) == (
            "NCCL", "/n", "/c",
        )  # fmt: skip

    @pytest.mark.parametrize("tf", ["2.15.1", "2.16.2", "2.21.0"])
    def test_the_patch(self, tf, tmp_path):
        files = {
            "horovod/tensorflow/xla_mpi_ops.cc": "text",
            "horovod/torch/CMakeLists.txt": "before\nset(CMAKE_CXX_STANDARD 14)\nafter\n",
            "third_party/flatbuffers/include/flatbuffers/stl_emulation.h": "  const size_type count_;\n",
            "horovod/common/operations.cc": OPERATIONS,
            "third_party/gloo/gloo/transport/tcp/pair.h": "        timeout_ * 5,\n",
            "CMakeLists.txt": 'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -pthread -fPIC -Wall")\n',
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        recipe.patch(tmp_path, tf)
        ops, torch, span, operations, pair, cmake = ((tmp_path / name).read_text() for name in files)
        assert bool(ops) == (tf == "2.15.1")
        assert torch == "before\nset(CMAKE_CXX_STANDARD 17)\nafter\n"
        assert span == "  size_type count_;\n"
        assert pair == "        timeout_ * 2,\n"
        assert operations.count("try {") == operations.count("state.initialization_failed = true;\n      return;") == 2
        assert operations.count("Initialize(") == 2 and "initialization_failed = false;" in operations
        assert " -include cstdint -include stdexcept -include string -pthread -fPIC -Wall" in cmake

    def test_the_cached_wheels_keep_their_names(self, tmp_path, monkeypatch):
        """Others find them under this name."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        env = Environment(Path("python"), (3, 11), "2.21.0", tmp_path / "log", torch="2.13.0")
        name = f"horovod0.28.1-tf2.21.0-cp311-{sysconfig.get_platform()}-{''.join(libc_ver())}-2"
        assert horovod.wheel_directory(env) == tmp_path / "hvd_compress" / "wheels" / name
        assert horovod.wheel_directory(env, Features(pytorch=True)).name == f"{name}-torch2.13.0"


class TestProgress:
    @pytest.mark.parametrize(
        ("line", "percent"),
        [
            ("  [  7%] Building CXX object gloo/types.cc.o", 7),
            ("[100%] Built target tensorflow", 100),
            ("[30/120] Building CXX object gloo/types.cc.o", 25),
            ("  error: [12%] is no step", None),
            ("g++ -O3 x.cc", None),
        ],
    )
    def test_steps(self, line, percent):
        assert progress.compiled(line) == percent

    def test_what_is_shown(self):
        out = io.StringIO()
        with progress.Progress("compiling", out) as shown:
            assert shown.text() == "compiling: 0:00 min"
            shown.line("[ 12%] Building CXX object x.cc.o")
            shown.line("a warning")
        assert out.getvalue().startswith("  compiling: 0:0") and out.getvalue().endswith(", 12% of the files\n")


# A python whose pip makes a source package and a wheel, and notes what it was asked for.
FAKE = """\
import io, os, sys, tarfile, zipfile
words = sys.argv[1:]
with open(os.environ["NOTES"], "a") as notes:
    print(" ".join(words[:3]), file=notes)
def target(option):
    return words[words.index(option) + 1]
if words[:3] == ["-m", "pip", "download"]:
    with tarfile.open(os.path.join(target("-d"), "horovod-0.28.1.tar.gz"), "w:gz") as archive:
        for name in (
            "horovod/tensorflow/xla_mpi_ops.cc", "horovod/torch/CMakeLists.txt", "CMakeLists.txt",
            "third_party/flatbuffers/include/flatbuffers/stl_emulation.h", "horovod/common/operations.cc",
            "third_party/gloo/gloo/transport/tcp/pair.h",
        ):
            data = b"text"
            member = tarfile.TarInfo("horovod-0.28.1/" + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
if words[:3] == ["-m", "pip", "wheel"]:
    assert os.environ["HOROVOD_WITH_GLOO"] == "1" and "HOROVOD_RANK" not in os.environ
    assert os.environ["PYTHONPATH"].endswith("/tools") and os.environ["MAKEFLAGS"].startswith("-j")
    assert os.path.getsize(words[-1] + "/horovod/tensorflow/xla_mpi_ops.cc") == 0
    print("[ 50%] Building CXX object x.cc.o")
    if os.environ.get("FAILS") == "build":
        sys.exit(1)
    with zipfile.ZipFile(os.path.join(target("-w"), "horovod-0.28.1-cp311.whl"), "w") as archive:
        archive.writestr("horovod/tensorflow/mpi_lib.so", "")
if words[:3] == ["-m", "pip", "install"] and os.environ.get("FAILS") == "network":
    print("Temporary failure in name resolution")
    sys.exit(1)
if words[0] == "-c" and os.environ.get("FAILS") == "start":
    sys.exit(1)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An environment whose python is FAKE; `fake.notes()` says what it has done since the last call."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    python = executable(tmp_path / "bin" / "python", f'exec {sys.executable} -S {script} "$@"\n')
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOROVOD_RANK", "1")  # the caller's own, which must not reach the build
    monkeypatch.setattr(prerequisites, "missing", lambda *rest: [])
    env = Environment(python, (3, 11), "2.21.0", tmp_path / "log")

    def done():
        text = notes.read_text() if notes.exists() else ""
        notes.write_text("")
        return [line.split()[-1] for line in text.splitlines() if line.startswith("-m pip")]

    env.notes = done
    return env


class TestInstall:
    def test_it_is_built_once_and_kept(self, fake, capsys):
        kept = horovod.install(fake)
        assert kept.parent == horovod.wheel_directory(fake) and horovod.wheel_is_good(kept)
        assert fake.notes() == ["install", "download", "wheel", "install"]
        assert "50% of the files" in capsys.readouterr().out
        assert horovod.install(fake) == kept
        assert fake.notes() == ["install"]
        assert "as built before" in capsys.readouterr().out

    def test_a_damaged_wheel_is_built_again(self, fake):
        kept = horovod.install(fake)
        kept.write_bytes(kept.read_bytes()[:40])
        fake.notes()
        assert horovod.wheel_is_good(horovod.install(fake))
        assert "wheel" in fake.notes()

    @pytest.mark.parametrize(
        ("fails", "message"),
        [
            ("build", "did not build for TensorFlow 2.21.0: see"),
            ("start", "was built but does not start"),
            ("network", "pip cannot reach its package index"),
        ],
    )
    def test_what_fails_is_said_in_one_line(self, fake, monkeypatch, fails, message):
        monkeypatch.setenv("FAILS", fails)
        with pytest.raises(SetupError, match=message) as error:
            horovod.install(fake)
        assert "\n" not in str(error.value) and str(fake.log) in str(error.value)
        assert horovod.kept_wheel(fake) is None

    def test_the_wheel_for_other_machines(self, fake, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(Environment, "this", lambda log: fake)
        assert command.main(["wheel", "-o", str(tmp_path / "out")]) == 0
        (wheel,) = (tmp_path / "out").glob("*.whl")
        assert horovod.wheel_is_good(wheel)
        out = capsys.readouterr().out
        assert f"pip install --no-deps {wheel.name}" in out and "TensorFlow 2.21.0" in out
        assert "install" not in fake.notes()[1:]  # nothing into the environment: the first one is --target

    @pytest.mark.parametrize(
        ("tf", "message"),
        [("", "there is no TensorFlow in the environment"), ("2.14.1", "TensorFlow 2.14.1 is too old")],
    )
    def test_tensorflow_is_looked_for_first(self, monkeypatch, tmp_path, capsys, tf, message):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(environment, "installed", lambda *names: tf if "tensorflow" in names else "")
        assert command.main(["install"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"hvd-compress horovod: {message}")

    def test_reasons_of_a_failed_check(self):
        for output, reason in {
            "ModuleNotFoundError: No module named 'horovod'": "there is no Horovod",
            "ImportError: mpi_lib.so: undefined symbol: _ZN10tensorflow": "another TensorFlow (undefined symbol)",
            "[0]<stderr>:RuntimeError: connection closed by peer": "RuntimeError: connection closed by peer",
        }.items():
            assert reason in command.reason(output)

    def test_a_launcher_that_hangs_leaves_nothing_behind(self, monkeypatch, tmp_path):
        """The launcher and its child ignore SIGTERM."""
        text = "trap '' TERM; sleep 600 & echo $!; wait"
        monkeypatch.setattr(command, "_END_SECONDS", 0.5)
        process = subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True)
        child = Path("/proc", process.stdout.readline().strip(), "stat")
        assert child.exists()
        command.end(process)
        assert process.returncode == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while child.exists() and child.read_text().rpartition(") ")[2][0] not in "ZX" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert time.monotonic() < deadline


class TestWithoutPackages:
    def run(self, *words, code="from hvd_compress.tools.entry import main; main()", stdout=subprocess.PIPE):
        # -S: not even the packages of this environment.
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'hvd-compress'; {code}"
        arguments = [sys.executable, "-S", "-c", start, *words]
        return subprocess.run(arguments, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, cwd="/")

    def test_the_command_needs_the_standard_library_only(self):
        shown = self.run("horovod", "--help")
        assert shown.returncode == 0 and "install | wheel | check" in shown.stdout
        looked = self.run("doctor", "--env")
        assert looked.returncode == 1 and "TensorFlow or Horovod does not load" in looked.stdout, looked.stderr

    @pytest.mark.parametrize("words", [("horovod", "--help"), ("doctor", "--env")])
    def test_nothing_reads_the_output_any_more(self, words):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w") as output:
            shown = self.run(*words, stdout=output)
        assert shown.returncode in (0, 1) and shown.stderr == ""  # argparse hides it if it prints much

    def test_other_commands_say_how_to_get_them(self):
        refused = self.run("plan")
        assert refused.returncode == 1
        (line,) = refused.stderr.splitlines()
        assert "click: pip install 'hvd_compress[tools]'" in line and "`horovod`" in line

    def test_setup_env_takes_the_same_code(self):
        code = f"""
        import runpy
        names = runpy.run_path({str(ROOT / "scripts" / "setup_env.py")!r}, run_name="setup_env")
        assert names["horovod"].__name__ == "hvd_compress.install.horovod"
        print("ok")
        """
        done = self.run(code=textwrap.dedent(code).strip().replace("\n", "; "))
        assert done.stdout == "ok\n", done.stderr


def test_documented_commands_parse():
    """Those of `horovod` and `doctor --env` have parsers of their own."""
    sys.path.insert(0, str(ROOT / "tests"))
    import re

    from doc_blocks import PAGES

    from hvd_compress.tools import env_doctor

    found = 0
    for page in PAGES:
        for words in re.findall(r"hvd-compress ((?:horovod|doctor --env)[^`\n#;]*)", page.read_text(encoding="utf-8")):
            words = words.split()
            if words[0] == "horovod" and len(words) > 1:
                command.parser().parse_args(words[1:])
                found += 1
            elif words[0] == "doctor" and len(words) > 2 and words[2].startswith("--"):
                env_doctor.parser().parse_args(words[2:])
                found += 1
    assert found >= 3


def test_one_job_per_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert prerequisites.jobs() == min(64, memory // 2**31)
