"""The files of residual checkpoints: whatever happens to them, they load as written or are refused in one line."""

import builtins
import io
import json
import os
import pickle
import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.checkpoint import files, resume
from hvd_compress.checkpoint.plan_state import Member, PlanState
from hvd_compress.common.names import renumbered, without_counters

BFLOAT16 = tf.bfloat16.as_numpy_dtype
SETTINGS = {"compression": "int8", "momentum_correction": 0.9}


def state(seed, dtype=np.float32):
    """What a rank keeps of two compressed kernels and a bias, in three chunks."""
    rng = np.random.default_rng(seed)
    members = [Member("m/dense/kernel", (3, 2), "dense"), Member("m/dense/bias", (2,), "dense")]
    members.append(Member("m/dense_1/kernel", (4,), "dense"))

    def tensors():
        return {i: rng.standard_normal(members[i].shape).astype(dtype) for i in (0, 2)}

    padding = {field: [rng.standard_normal(2).astype(dtype)] for field in ("residuals", "velocities")}
    held = {"residuals": tensors(), "velocities": tensors()}
    return PlanState(members, held, padding, [[[0, 2], 3, [4]]], {"step": np.asarray(seed)})


def save(directory, step, states, keep=2):
    """As all ranks together do it, one after the other."""
    number = files.next_number(directory)
    manifest = {"save": f"token {number}", "step": step, "ranks": len(states), "settings": SETTINGS}
    for rank, one in enumerate(states):
        packed, arrays = one.packed("0")
        files.write_rank(directory, number, {**manifest, "rank": rank, "plans": [packed]}, arrays)
    files.write_manifest(directory, number, manifest)
    for _ in states:
        files.prune(directory, files.complete(directory)[-keep:])


def load(directory, ranks, step=None, variables=None):
    """The step, and each rank's state."""
    number, manifest = resume.find(directory, step)
    read = [resume.read(directory, number, manifest, rank, ranks, variables) for rank in range(ranks)]
    return manifest["step"], [states for (states,) in read]


def assert_same(first, second):
    assert (first.members, first.chunk_layouts) == (second.members, second.chunk_layouts)
    (meta, arrays), (other_meta, others) = first.packed("0"), second.packed("0")
    assert meta == other_meta and sorted(arrays) == sorted(others)
    for name, array in arrays.items():
        assert array.dtype == others[name].dtype and array.shape == others[name].shape, name
        assert array.tobytes() == others[name].tobytes(), name


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path / "residuals")


def refused(match, function, *arguments, **keywords):
    with pytest.raises(ValueError, match=match) as error:
        function(*arguments, **keywords)
    assert "\n" not in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None  # no traceback of zipfile's


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_what_is_read_is_what_was_written(dtype, directory):
    written = [state(rank, dtype) for rank in range(3)]
    save(directory, 7, written)
    step, read = load(directory, 3)
    assert step == 7
    for one, other in zip(written, read):
        assert_same(one, other)
    assert sorted(os.listdir(directory + "/save-00000001")) == [
        "manifest.json", *(f"rank-{rank}-of-3.npz" for rank in range(3))
    ]  # fmt: skip


def test_files_are_plain_arrays_and_text(directory):
    save(directory, 7, [state(0, BFLOAT16)])
    with zipfile.ZipFile(files.rank_path(directory, 1, 0, 1)) as archive:
        for name in archive.namelist():
            array = np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
            assert array.dtype.kind in "uif", name
    json.loads(Path(directory, "save-00000001", "manifest.json").read_text())


def test_a_pickle_is_never_loaded(directory, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    save(directory, 7, [state(0)])
    path = files.rank_path(directory, 1, 0, 1)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "0.residuals.0": np.array([Trap()], object)})
    refused("is damaged", load, directory, 1)
    with open(path, "wb") as file:
        pickle.dump(Trap(), file)
    refused("is damaged", load, directory, 1)
    assert not (tmp_path / "sprung").exists()


def test_only_the_expected_arrays_are_read(directory):
    written = state(0)
    save(directory, 7, [written])
    with zipfile.ZipFile(files.rank_path(directory, 1, 0, 1), "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.residuals.1.npy", b"no array: reading it is an error")
        archive.writestr("more.npy", bytes(10**7))
    _, (read,) = load(directory, 1)
    assert_same(read, written)


def test_a_missing_file_says_what_is_needed(directory):
    save(directory, 7, [state(0), state(1)])
    os.unlink(files.rank_path(directory, 1, 1, 2))
    refused("rank-1-of-2.npz is missing: each rank needs the file that it wrote", load, directory, 2)
    refused("is missing: 1 ranks instead of 2 need a file system that all", load, directory, 1)
    refused("rank-1-of-2.npz is missing$", files.read_rank, files.rank_path(directory, 1, 1, 2), dict)
    os.unlink(files.save_path(directory, 1) + "/manifest.json")
    assert resume.find(directory, None) is None
    assert resume.find(directory + "/nowhere", None) is None


def test_a_file_cut_short_anywhere_is_refused(directory):
    save(directory, 7, [state(0)])
    path = files.rank_path(directory, 1, 0, 1)
    content = Path(path).read_bytes()
    for length in range(0, len(content), 17):
        with open(path, "wb") as file:
            file.write(content[:length])
        refused("rank-0-of-1.npz is damaged or cut short", load, directory, 1)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_changed_byte_is_refused_unless_it_means_nothing(mask, directory):
    written = state(0)
    save(directory, 7, [written])
    path = files.rank_path(directory, 1, 0, 1)
    content = Path(path).read_bytes()
    caught = 0
    for i in range(0, len(content), 5):
        with open(path, "wb") as file:
            file.write(content[:i] + bytes([content[i] ^ mask]) + content[i + 1 :])
        try:
            _, (read,) = load(directory, 1)
        except ValueError as error:
            assert "\n" not in str(error) and path in str(error)
            caught += 1
        else:  # a time stamp, say
            assert_same(read, written)
    assert caught > len(content) / 5 / 2


def test_a_changed_or_short_manifest_is_refused_or_found_not_to_match(directory):
    written = state(0)
    save(directory, 7, [written])
    path = files.save_path(directory, 1) + "/manifest.json"
    content = Path(path).read_bytes()
    changed = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(len(content))]
    for damaged in [content[:i] for i in range(len(content) - 1)] + changed:
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            step, (read,) = load(directory, 1)
        except ValueError as error:
            assert "\n" not in str(error)
        else:  # white space
            assert step == 7
            assert_same(read, written)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=4),
    st.none() | st.integers(0, 10**6),
    st.booleans(),
)
def test_random_damage_is_refused_or_means_nothing(flips, length, swapped):
    with tempfile.TemporaryDirectory() as directory:
        written = [state(0), state(1)]
        save(directory, 7, written)
        paths = [files.rank_path(directory, 1, rank, 2) for rank in range(2)]
        content = bytearray(Path(paths[0]).read_bytes())
        for where, bit in flips:
            content[where % len(content)] ^= 1 << bit
        Path(paths[0]).write_bytes(content if length is None else content[: length % (len(content) + 1)])
        if swapped:
            os.rename(paths[0], directory + "/0")
            os.rename(paths[1], paths[0])
            os.rename(directory + "/0", paths[1])
        try:
            _, read = load(directory, 2)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
        else:  # a time stamp, say
            assert not swapped
            for one, other in zip(read, written):
                assert_same(one, other)


@pytest.mark.parametrize("who", ["manifest", "rank"])
def test_another_version_or_format_is_refused(who, directory, monkeypatch):
    def write(name, value):
        shutil.rmtree(directory, ignore_errors=True)
        save(directory, 7, [state(0)])
        with monkeypatch.context() as patch:
            patch.setattr(files, name, value)
            _, manifest = 1, {"save": "token 1", "step": 7, "ranks": 1, "settings": SETTINGS}
            if who == "manifest":
                files.write_manifest(directory, 1, manifest)
            else:
                files.write_rank(directory, 1, {**manifest, "rank": 0, "plans": []}, {})

    write("VERSION", 2)
    refused("is of format version 2, and this hvd_compress reads 1$", load, directory, 1)
    write("FORMAT", "something else")
    refused("is no file of hvd_compress residuals$", load, directory, 1)


def test_files_of_another_save_are_refused(directory):
    save(directory, 7, [state(0), state(1)])
    save(directory, 8, [state(2), state(3)])
    shutil.copy(files.rank_path(directory, 1, 1, 2), files.rank_path(directory, 2, 1, 2))
    refused("belongs to another save than its manifest", load, directory, 2)


def test_ranks_may_have_rounded_measurements_differently():
    def of_rank(step, choice, progress, weight, trial=-1):
        named = {"step": step, "auto_choice": choice, "auto_progress": progress, "synchronized_0_0": weight}
        named["auto_trial"] = np.int32(trial)
        named = {name: np.asarray(value) for name, value in named.items()}
        return PlanState([Member("kernel", (2,), "dense")], {}, {}, [], named).summary

    one = of_rank(3, 1, np.float32(0.1), np.float32(0.5))
    assert of_rank(3, 1, np.nextafter(np.float32(0.1), np.float32(1)), np.float32(0.5), trial=1) == one
    for step, choice, weight in ((4, 1, 0.5), (3, 0, 0.5), (3, 1, 0.6)):
        assert of_rank(step, choice, np.float32(0.1), np.float32(weight)) != one


def test_the_save_of_the_models_step_is_found(directory):
    assert resume.find(directory, 3) is None
    for step in (10, 20, 30, 20):
        save(directory, step, [state(step)], keep=9)
    for step, number in {10: 1, 20: 4, 30: 3, None: 4}.items():
        assert resume.find(directory, step)[0] == number
    refused(r"has residuals of steps \[10, 20, 20, 30\], and the model is at step 15", resume.find, directory, 15)


def test_a_damaged_manifest_hides_only_its_own_save(directory):
    for step in (10, 20, 30):
        save(directory, step, [state(step)], keep=9)
    os.truncate(files.save_path(directory, 3) + "/manifest.json", 20)
    assert resume.find(directory, 20)[0] == 2
    refused("save-00000003/manifest.json is missing or damaged", resume.find, directory, 30)
    refused("save-00000003/manifest.json is missing or damaged", resume.find, directory, None)


def variables(*specs):
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in specs]


@pytest.mark.parametrize(
    "entry",
    [
        {"ranks": 10**300}, {"ranks": 0}, {"step": -1}, {"step": 10**300},
        {"save": None}, {"step": None}, {"ranks": None}, {"settings": None}, {"settings": []},
    ],
)  # fmt: skip
def test_a_manifest_with_numbers_of_no_training_is_refused(directory, entry):
    save(directory, 7, [state(0)])
    path = Path(files.save_path(directory, 1)) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))
    (name,) = entry
    refused(f"manifest.json is damaged: {name} is ", files.read_manifest, directory, 1)


def test_a_gradient_without_a_path_is_refused(directory):
    one = state(0)
    one.members[0] = one.members[0]._replace(path=None)
    save(directory, 7, [one])
    refused("cannot be used: None is not the path of a variable", load, directory, 1)


def broken(change):
    one = state(0)
    one.waiting = {"0-of-1-bucket-0-0": np.zeros(3, np.uint8)}
    change(one)
    return one


def with_padding(value):
    return broken(lambda one: one.padding.update(residuals=[np.asarray(value)]))


@pytest.mark.parametrize(
    ("one", "match"),
    [
        (with_padding([np.nan, 0.0]), "the padding of residuals is not finite: resume from an earlier step"),
        (with_padding(["a", "b"]), "the padding of residuals is of type <U1"),
        (with_padding([1, 2]), "the padding of residuals is of type int64"),
        (with_padding([[1.0, 2.0]]), r"the padding of residuals has the shape \(1, 2\), and must have one dimension"),
        (broken(lambda one: one.replicated_state.update(auto_link=np.array("a"))), "auto_link is of type <U1"),
        (broken(lambda one: one.waiting.update(more=np.array(b"a"))), "more is of type"),
    ],
)
def test_values_of_no_training_are_refused(one, match, directory):
    save(directory, 7, [one])
    refused(f"rank-0-of-1.npz cannot be used: {match}", load, directory, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.padding.update(residuals=[np.zeros(1, np.float32)]),
        lambda one: one.padding.update(residuals=[np.zeros(2, np.float64)]),
        lambda one: one.tensors["residuals"].update({0: np.zeros((3, 2), np.float64)}),
        lambda one: one.chunk_layouts[0].reverse(),
        lambda one: one.replicated_state.update(step=np.asarray(0, np.int32)),
        lambda one: one.replicated_state.update(auto_link=np.float32([1, np.nan])),
        lambda one: one.replicated_state.update(auto_link=np.float32([1])),
    ],
)
def test_what_must_be_equal_on_all_ranks_is_in_the_summary(change):
    def with_link():
        one = state(0)
        one.replicated_state["auto_link"] = np.float32([1, 1])
        return one

    changed = with_link()
    change(changed)
    assert changed.summary != with_link().summary
    other = with_link()
    other.tensors["residuals"][0] += 1
    assert other.summary == with_link().summary


def test_a_compressed_member_is_refused(directory):
    """A file of few bytes could fill the memory."""
    save(directory, 7, [state(0)])
    path = files.rank_path(directory, 1, 0, 1)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez_compressed(path, **arrays)
    refused("rank-0-of-1.npz is damaged: metadata is compressed", load, directory, 1)


def test_another_model_is_refused(directory):
    save(directory, 7, [state(0)])
    own = ("m_3/dense_1/kernel", (3, 2)), ("m_3/dense_1/bias", (2,)), ("m_3/dense_2/kernel", (4,))
    load(directory, 1, variables=variables(*own))  # Keras has counted on, and that is all
    load(directory, 1, variables=variables(("m/more/kernel", (9,)), *own))
    for other in (own[1:], [("m/dense/kernel", (2, 3)), *own[1:]], [("m/head/kernel", (3, 2)), *own[1:]]):
        refused("belongs to another model: it has m/dense/kernel", load, directory, 1, variables=variables(*other))


def test_other_settings_are_refused():
    resume.check_settings(SETTINGS, SETTINGS, "here")
    other = {**SETTINGS, "compression": "topk:ratio=0.01"}
    line = "here was saved with compression='int8', and this run has 'topk:ratio=0.01': use the same"
    refused(line, resume.check_settings, SETTINGS, other, "here")
    refused("momentum_correction=None", resume.check_settings, {"compression": "int8"}, SETTINGS, "here")


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("old", [1, 2, 3, 4, 5])
def test_the_sum_over_ranks_is_kept(old, new, directory):
    written = [state(rank) for rank in range(old)]
    save(directory, 7, written)
    _, read = load(directory, new)
    for field in ("residuals", "velocities"):
        for i in (0, 2):
            then = np.stack([one.tensors[field][i].astype(np.float64) for one in written])
            now = np.stack([one.tensors[field][i].astype(np.float64) for one in read])
            np.testing.assert_allclose(now.sum(0), then.sum(0), atol=1e-6)
            for rank in range(new):
                np.testing.assert_allclose(now[rank], then[rank::new].sum(0), atol=1e-6)


class Killed(BaseException):
    """What nothing catches, as nothing catches SIGKILL."""


class Operations:
    """Counts what is done to the disk, and kills the process before the operation of a given number."""

    def __init__(self, patch, last):
        self.left = last
        for name in ("mkdir", "open", "fsync", "replace", "unlink", "rmdir", "close"):
            patch.setattr(os, name, self.counted(getattr(os, name)))
        patch.setattr(files, "open", self.counted(builtins.open), raising=False)
        patch.setattr(np, "savez", self.savez)
        self.real_savez = np.savez

    def step(self):
        if self.left == 0:
            raise Killed
        self.left -= 1

    def counted(self, function):
        def call(*arguments, **keywords):
            self.step()
            return function(*arguments, **keywords)

        return call

    def savez(self, file, **arrays):
        """Writes in two halves."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, array in arrays.items():
                with archive.open(name + ".npy", "w") as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
        half = len(content.getvalue()) // 2
        file.write(content.getvalue()[:half])
        file.flush()
        self.step()
        file.write(content.getvalue()[half:])


@pytest.mark.parametrize("keep", [1, 2])
def test_a_job_killed_at_any_point_leaves_a_complete_save(keep, tmp_path, monkeypatch):
    states = {step: [state(10 * step + rank) for rank in range(2)] for step in (1, 2, 3)}
    outcomes = []
    for last in range(200):
        directory = str(tmp_path / str(last))
        for step in (1, 2):
            save(directory, step, states[step], keep=2)
        with monkeypatch.context() as patch:
            Operations(patch, last)
            try:
                save(directory, 3, states[3], keep)
            except Killed:
                pass
            else:
                break
        step, read = load(directory, 2)
        assert step in (2, 3)
        for one, other in zip(read, states[step]):
            assert_same(one, other)
        outcomes.append(step)
        # The next run is not disturbed by what is left.
        save(directory, 4, states[1], keep)
        assert load(directory, 2)[0] == 4
        left = files.numbers(directory)
        assert left == files.complete(directory) and len(left) == keep
    else:
        pytest.fail("it never ended")
    # Killed before the manifest was there: the one before; after: the new one.
    assert outcomes == sorted(outcomes) and outcomes.count(2) > 10 and outcomes.count(3) > 3


def test_prune_leaves_what_is_not_its_own(directory):
    for step in (1, 2):
        save(directory, step, [state(step)], keep=9)
    os.makedirs(directory + "/save-00000009")  # begun by a job that still runs
    os.makedirs(directory + "/model")
    for path in ("/save-00000001/notes.txt", "/weights.h5"):
        open(directory + path, "w").close()
    files.prune(directory, [2])
    assert sorted(os.listdir(directory)) == [
        "model", "save-00000001", "save-00000002", "save-00000009", "weights.h5"
    ]  # fmt: skip
    assert os.listdir(directory + "/save-00000001") == ["notes.txt"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("sequential_1/dense_12/kernel", "dense/kernel"), ("dense_1/kernel", "dense/kernel"),
        ("block_1_conv/kernel", "block_1_conv/kernel"), ("a/kernel_2", "a/kernel"), ("", ""),
    ],
)  # fmt: skip
def test_counters_and_outer_names_do_not_tell_models_apart(path, expected):
    assert without_counters(path) == expected


def test_new_numbers_keep_the_order_of_layers():
    assert renumbered(["tower_9/kernel", "tower_10/kernel", "head"]) == [
        "tower_0/kernel_0",
        "tower_1/kernel_0",
        "head_0",
    ]
    assert renumbered(["tower/kernel", "tower_1/kernel"]) == renumbered(["tower_3/kernel", "tower_5/kernel"])
    assert renumbered(["tower_2/kernel", "tower_1/kernel"]) != renumbered(["tower_1/kernel", "tower_2/kernel"])
