"""Files and environment variables with random changes: an error of one line, or a result that can be used."""

import copy
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_files import SETTINGS, state

from hvd_compress.checkpoint import files, resume
from hvd_compress.checkpoint.plan_state import PlanState
from hvd_compress.compressors import Compressor
from hvd_compress.compressors.resolve import resolve
from hvd_compress.cost import Calibration
from hvd_compress.frontends.environment import resolve_bucket_bytes, resolve_exchange
from hvd_compress.tools import run_log
from hvd_compress.tools.cli import main

RUNS = Path(__file__).resolve().parent.parent / "data" / "runs"
RING = {"alpha": 1e-4, "beta": 8e-9, "gamma": 0.0, "burst": 0.0}
KERNEL = {"call": 1e-5, "encode": 1e-9, "decode": 1e-10, "decode_rank": 1e-10}
CALIBRATION = {
    "format": "hvd_compress calibration 1",
    "ranks": 4,
    "links": dict.fromkeys(["allreduce", "allgather", "alltoall"], RING),
    "kernels": {"none": dict.fromkeys(KERNEL, 0.0), "quantize": KERNEL, "topk": KERNEL},
    "levels": {
        "hosts": 2,
        "workers": 2,
        "inside": dict.fromkeys(["reduce_scatter", "allgather"], RING),
        "across": dict.fromkeys(["alltoall", "allgather"], RING),
    },
}

numbers = st.integers(-3, 3) | st.integers() | st.floats() | st.sampled_from([10**400, -(10**19), 2**63, 1e300, 1e-320])
texts = st.text(max_size=8) | st.sampled_from(["\x1b[2J", "a\nhealthy", "$\\frac{$", "<script>", "int8", "0", "1e999"])
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(leaves, lambda some: st.lists(some, max_size=3) | st.dictionaries(texts, some, max_size=3))
values |= st.builds(lambda: json.loads("[" * 400 + "]" * 400))


def places(tree, path=()):
    """The paths to all values in a tree of JSON."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    children = () if len(path) > 6 else children
    return [path, *(found for key, child in children for found in places(child, (*path, key)))]


@st.composite
def changed(draw, tree):
    """The tree with some values replaced, left out or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from(places(tree)[1:] or [(0,)]))
        parent = tree
        for key in path:
            parent = parent[key]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "delete", "whole"]))
        if kind == "whole" and not draw(st.integers(0, 9)):
            return draw(values)
        if kind == "delete":
            del parent[last]
        else:
            parent[last] = copy.deepcopy(draw(values))
        if not places(tree)[1:]:
            break
    return tree


def assert_one_line(error):
    assert str(error) and len(str(error).splitlines()) == 1 and len(str(error)) < 600, str(error)


@given(changed(CALIBRATION))
def test_calibration_files(tree):
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "c.json")
        Path(path).write_text(json.dumps(tree))
        try:
            calibration = Calibration.load(path)
        except ValueError as error:
            assert_one_line(error)
            return
    model = calibration.model()
    for spec in ("none", "int8", "topk"):
        try:
            seconds = model.predict(spec, 10**6).total
        except ValueError as error:  # it does not know this compressor
            assert_one_line(error)
        else:
            assert math.isfinite(seconds) and seconds >= 0.0


META = json.loads((RUNS / "healthy" / "run.json").read_text())
CSVS = {name: (RUNS / "healthy" / name).read_text() for name in ("rank-0.csv", "rank-0-buckets.csv", "rank-1.csv")}
CSVS |= {"auto.csv": (RUNS / "healthy_auto" / "auto.csv").read_text()}
CSVS |= {"guard.csv": (RUNS / "guarded" / "guard.csv").read_text()}
cells = st.text(max_size=6) | st.sampled_from(["nan", "inf", "-inf", "1e308", "-1", "9" * 400, '"', "\x1b[2J", "\0"])


@st.composite
def damaged_csv(draw):
    """The name of a file, and its text with some cells, lines or characters changed."""
    name = draw(st.sampled_from(sorted(CSVS)))
    rows = [line.split(",") for line in CSVS[name].splitlines()]
    for _ in range(draw(st.integers(1, 4))):
        row = draw(st.integers(0, len(rows) - 1))
        kind = draw(st.sampled_from(["cell", "cell", "column", "copy", "cut", "drop"]))
        column = draw(st.integers(0, max(0, len(rows[0]) - 1)))  # a header may be cut
        if kind == "cell" and column < len(rows[row]):
            rows[row][column] = draw(cells)
        elif kind == "column":
            cell = draw(cells)
            rows[1:] = [[cell if i == column else old for i, old in enumerate(cols)] for cols in rows[1:]]
        elif kind == "copy":
            rows.append(list(rows[row]))
        elif kind == "cut":
            rows[row] = rows[row][:column]
        elif kind == "drop" and len(rows) > 2:
            del rows[row]
    return name, "\n".join(",".join(cells_) for cells_ in rows)


@given(st.none() | changed(META), st.lists(damaged_csv(), max_size=2))
def test_run_directories(meta, texts):
    with tempfile.TemporaryDirectory() as directory:
        for name in CSVS:
            (Path(directory) / name).write_text(CSVS[name])
        (Path(directory) / "run.json").write_text(json.dumps(META if meta is None else meta))
        for name, text in texts:
            (Path(directory) / name).write_text(text, encoding="utf-8", errors="replace")
        result = CliRunner().invoke(main, ["doctor", directory])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code in (0, 1, 2)
        output = result.output
        assert all(character.isprintable() or character == "\n" for character in output)
        assert "Traceback" not in output and "RuntimeWarning" not in output
        if result.exit_code == 2:
            assert_one_line(output[output.index("Error: ") :].strip())
        else:
            run_log.load(directory)
            as_json = CliRunner().invoke(main, ["doctor", directory, "--json"])
            assert as_json.exit_code == result.exit_code
            json.loads(as_json.stdout if hasattr(as_json, "stdout") else as_json.output)


def rank_metadata():
    manifest = {"save": "token 1", "step": 7, "ranks": 2, "settings": SETTINGS}
    packed, arrays = state(0).packed("0")
    return manifest, {**manifest, "rank": 0, "plans": [json.loads(json.dumps(packed))]}, arrays


MANIFEST, METADATA, ARRAYS = rank_metadata()


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory):
    """A file of rank 0, as it was saved."""
    directory = str(tmp_path_factory.mktemp("save"))
    files.write_rank(directory, 1, METADATA, ARRAYS)
    return files.rank_path(directory, 1, 0, 2)


@given(manifest=st.none() | changed(MANIFEST), metadata=st.none() | changed(METADATA), ranks=st.sampled_from([1, 2, 3]))
def test_checkpoints(rank_file, manifest, metadata, ranks):
    known = {"format": files.FORMAT, "version": files.VERSION, "bfloat16": []}
    with tempfile.TemporaryDirectory() as directory:
        os.makedirs(files.save_path(directory, 1))
        for rank in range(2):
            shutil.copy(rank_file, files.rank_path(directory, 1, rank, 2))
        if metadata is not None:
            text = json.dumps({**known, **metadata} if isinstance(metadata, dict) else metadata)
            with open(files.rank_path(directory, 1, 0, 2), "wb") as file:
                np.savez(file, **ARRAYS, **{files._METADATA: np.frombuffer(text.encode(), np.uint8)})
        manifest = MANIFEST if manifest is None else manifest
        text = json.dumps({**known, **manifest} if isinstance(manifest, dict) else manifest)
        (Path(files.save_path(directory, 1)) / files._MANIFEST).write_text(text)
        try:
            number, read = resume.find(directory, 7)
            resume.check_settings(read["settings"], SETTINGS, "the save")
            states = resume.read(directory, number, read, 0, ranks, None)
        except ValueError as error:
            assert_one_line(error)
        else:
            for one in states:
                assert isinstance(one, PlanState)
                one.check()
                str(one.summary)


@given(texts | st.sampled_from(["1" * 5000, "\u0662", "\u00b2", "1_0", "+5", "-1", "1e3", " 7 ", "0"]))
def test_environment_variables(text):
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", text)
        monkeypatch.setenv("HVD_COMPRESS", text)
        try:
            assert resolve_bucket_bytes(None) >= 1
        except ValueError as error:
            assert_one_line(error)
        monkeypatch.setenv("HVD_COMPRESS_EXCHANGE", text)
        try:
            assert resolve_exchange().keys() <= {"delay", "local_steps"}
        except ValueError as error:
            assert_one_line(error)
        try:
            assert isinstance(resolve(None), Compressor)
        except ValueError as error:
            assert_one_line(error)
            assert "HVD_COMPRESS" in str(error)
