"""Each example, run as its users run it, with a small setting: does it do what it prints?"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT

from hvd_compress.compressors.auto import CANDIDATES

pytestmark = pytest.mark.timeout(920)  # the runs have time-outs of their own, and end their processes


def report(result, ranks=2):
    """The closing report of a run that went well, by its names: only rank 0 prints one."""
    assert result.returncode == 0, result.stderr[-3000:]
    text = result.stdout
    if ranks > 1:
        assert "[1]<stdout>" not in text
        text = re.sub(r"^\[0\]<stdout>:", "", text, flags=re.MULTILINE)
    pairs = re.findall(r"^([A-Za-z ]+): +(.+)$", text, flags=re.MULTILINE)
    lines = dict(pairs[[name for name, _ in pairs].index("workers") :])
    assert lines["workers"] == str(ranks)
    return lines


def check_bytes(lines, weights, at_least, rows=0):
    """Are all three numbers those of a gradient of so many float32 weights, and right together?

    `rows`: bytes of embeddings' rows and their numbers, which stock Horovod gathers.
    """
    sent, plain = (int(lines[name].split()[0].replace(",", "")) for name in ("sent per step", "stock Horovod"))
    assert plain == 4 * weights + rows  # of two workers, each sends half of it twice
    assert float(lines["ratio"]) == pytest.approx(plain / sent, abs=0.06)
    assert plain / sent > at_least


def accuracy(lines):
    return float(lines["test accuracy"].rstrip("%")) / 100


ONE_BY_ONE = """
import contextlib, io, json, runpy, sys, traceback

sys.path.insert(0, "examples")
ends = []
for command in json.loads(sys.argv[1]):
    sys.argv, status, out, err = command, 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                status = print(end.code, file=sys.stderr) or 1
        except BaseException:
            status = traceback.print_exc() or 1
    ends.append([status or 0, out.getvalue(), err.getvalue()])
print("\\n" + json.dumps(ends))
"""


def one_by_one(python, commands):
    """How each command ends, without a traceback: its status, stdout and stderr. One process runs them all.

    TensorFlow, which takes most of the time, is imported once.
    """
    result = python(["-c", ONE_BY_ONE, json.dumps(commands)])
    assert result.returncode == 0, result.stderr[-3000:]
    ends = json.loads(result.stdout.splitlines()[-1])
    assert not any("Traceback" in err for _, _, err in ends), ends
    return ends


def test_keras_mnist_goes_on_with_the_digits_where_mnist_cannot_be_downloaded(horovodrun, tmp_path):
    nowhere = "http://127.0.0.1:9"
    env = {"HOME": str(tmp_path), "KERAS_HOME": str(tmp_path), "https_proxy": nowhere, "HTTPS_PROXY": nowhere}
    result = horovodrun(2, ["examples/keras_mnist.py", "--epochs", "6"], env=env)
    lines = report(result)
    assert result.stdout.count("mnist cannot be had") == 1
    assert lines["data"] == "digits, 1437 images, tested on 360 others"
    assert lines["compressor"] == "auto"
    assert lines["chosen"].split(" for ")[0] in CANDIDATES
    assert lines["steps"].startswith(f"{6 * 23} in ")
    check_bytes(lines, 1_199_882, at_least=0.95)  # it may have chosen not to compress, in chunks with some padding
    each, whole = re.search(r"; predicted (\S+) s per step, (\S+) s in all$", lines["stock Horovod"]).groups()
    assert float(whole) == pytest.approx(6 * 23 * float(each), rel=0.01, abs=0.06)
    assert accuracy(lines) > 0.85


def test_keras_mnist_on_one_worker(python, tmp_path):
    model = tmp_path / "model.keras"
    lines = report(
        python(["examples/keras_mnist.py", "--data", "digits", "--epochs", "2", "--save", str(model)]),
        ranks=1,
    )
    assert lines["sent per step"] == "0 bytes: there is only one worker"
    assert accuracy(lines) > 0.85
    assert model.stat().st_size > 4 * 1_199_882


def test_help_says_that_the_default_is_auto_and_a_wrong_compression_is_explained(python):
    names = ("custom_loop", "keras_gpt", "keras_mnist", "keras_recommender", "keras_resnet")
    scripts = [f"examples/{name}.py" for name in names]
    commands = [[script, "--help"] for script in scripts]
    *helps, wrong = one_by_one(python, [*commands, [scripts[2], "--compression", "hybird:ratio=0.01"]])
    for status, out, _ in helps:
        assert status == 0 and "topk:ratio=0.01, ... (default: auto)" in " ".join(out.split())
    status, _, err = wrong
    assert status == 2 and "did you mean 'hybrid'?" in err


def test_the_report_says_what_auto_chose_and_what_stock_horovod_would_take():
    from hvd_compress.engine.compression_report import BucketReport, Candidate
    from hvd_compress.monitor import end_summary

    def bucket(chosen, together=False, **seconds):
        candidates = tuple(Candidate(spec, predicted, 1.0, 1.0, "") for spec, predicted in seconds.items())
        return BucketReport(1000, chosen, seconds[chosen], candidates=candidates, together=together)

    buckets = [bucket("int8", none=2.0, int8=0.5), bucket("none", none=0.25, int8=0.5)]
    rows = BucketReport(1000, "int4", rows_of="model/items")
    assert end_summary.chosen(buckets) == "int8 for 1 of 2 buckets, none for 1"
    assert end_summary.chosen([buckets[0], *buckets]) == "int8 for 2 of 3 buckets, none for 1"
    assert end_summary.chosen(buckets[:1] * 2) == "int8 for all 2 buckets"
    assert end_summary.chosen([buckets[0], rows]) == "int8 for 1 bucket, int4 for rows of model/items"
    assert end_summary.chosen([rows]) == "int4 for rows of model/items"
    assert end_summary.extra_seconds([*buckets, rows]) == 1.5
    assert (
        end_summary.extra_seconds([bucket("powersgd", True, none=2.0, powersgd=1.0)] * 2) == 3.0
    )  # 1 s for both buckets
    assert end_summary.extra_seconds([bucket("int8", int8=0.5)]) is None
    assert end_summary.extra_seconds([BucketReport(1000, "int8"), rows]) is None


@pytest.mark.slow
def test_keras_resnet20(horovodrun):
    small = "--data digits --compression int8 --batch-size 16 --steps 80 --lr 0.02 --warmup-epochs 1"
    result = horovodrun(2, ["examples/keras_resnet.py", *small.split()])
    lines = report(result)
    assert "finished gradual learning rate warmup to 0.04" in result.stdout
    assert lines["steps"].startswith("80 in ")
    check_bytes(lines, 270_410 - 688, at_least=3.5)
    assert accuracy(lines) > 0.5


@pytest.mark.slow
def test_keras_resnet50(horovodrun):
    small = (
        "--model resnet50 --synthetic --image-size 32 --batch-size 2 --steps 2 --compression hybrid:ratio=0.01,bits=4"
    )
    lines = report(horovodrun(2, ["examples/keras_resnet.py", *small.split()]))
    assert lines["data"] == "random images"
    assert lines["steps"].startswith("2 in ")
    check_bytes(lines, 25_557_032, at_least=60)


def patches(count, seed):
    """Pairs of class and picture: random windows of scikit-learn's two photographs, uint8 [height, width, 3]."""
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(seed)
    classes = itertools.cycle(zip(("china", "flower"), load_sample_images().images))
    for _, (name, photo) in zip(range(count), classes):
        height, width = random.integers(40, 200, 2)
        top, left = random.integers(0, photo.shape[0] - height), random.integers(0, photo.shape[1] - width)
        yield name, photo[top : top + height, left : left + width]


@pytest.fixture(scope="module")
def image_folders(tmp_path_factory):
    """131 images for training and 41 for validation, of two classes: neither number can be divided by two."""
    from PIL import Image

    root = tmp_path_factory.mktemp("folders")
    for part, count in (("train", 131), ("val", 41)):
        for i, (name, patch) in enumerate(patches(count, seed=len(part))):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(patch).save(folder / f"{i}.{('JPEG', 'png', 'jpg')[i % 3]}")
    return root


@pytest.fixture(scope="module")
def image_records(image_folders, tmp_path_factory):
    """The same images as TFRecords: three files for training, one for validation."""
    import tensorflow as tf

    root = tmp_path_factory.mktemp("records")
    for part, name, count in (("train", "train", 3), ("val", "validation", 1)):
        files = sorted((image_folders / part).glob("*/*"))
        for i in range(count):
            with tf.io.TFRecordWriter(str(root / f"{name}-{i:05}-of-{count:05}")) as writer:
                for file in files[i::count]:
                    writer.write(image_record(file.read_bytes(), 1 + (file.parent.name == "flower")))
    return root


def image_record(encoded, label):
    import tensorflow as tf

    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def image_training(data_dir, *options):
    """The command for a training of a few seconds."""
    small = "--image-size 16 --batch-size 8 --lr 0.02 --warmup-epochs 1 --compression int8"
    return ["examples/keras_resnet.py", "--data-dir", str(data_dir), *small.split(), *options]


@pytest.mark.slow
def test_keras_resnet_learns_pictures_and_resumes_as_if_it_had_not_stopped(horovodrun, python, image_folders, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    script = image_training(image_folders, "--epochs", "12", "--directory")
    lines = report(horovodrun(2, [*script, str(whole)]))
    assert lines["data"] == f"{image_folders}, 131 images of 2 classes, validated on 41 others"
    assert lines["steps"].startswith(f"{12 * 8} in ")  # 65 images of each worker are 8 batches
    assert float(lines["val accuracy"].rstrip("%")) > 80
    saved = ["epoch-0011.weights.h5", "epoch-0012.weights.h5"]
    assert sorted(file.name for file in whole.glob("*.h5")) == saved

    # As if the job had been killed at the end of the last epoch, when the residuals were saved and the weights not.
    shutil.copytree(whole, killed)
    (killed / saved[1]).unlink()
    resumed = report(horovodrun(2, [*script, str(killed), "--resume"]))
    assert resumed["steps"].startswith("8 in ")
    assert resumed["val accuracy"] == lines["val accuracy"]
    files = [weights_of(run / saved[1]) for run in (whole, killed)]
    assert len(files[0]) > 100 and files[0].keys() == files[1].keys()
    for path, array in files[0].items():
        np.testing.assert_array_equal(array, files[1][path], err_msg=path)

    result = python([*script, str(killed)])
    line = f"{killed} has checkpoints of another run: add --resume, or name another directory\n"
    assert result.returncode == 1 and result.stderr.endswith(line) and "Traceback" not in result.stderr


def test_keras_resnet_on_records_in_mixed_precision(python, image_records):
    options = "--classes 2 --epochs 1 --mixed-precision"
    lines = report(python(image_training(image_records, *options.split())), ranks=1)
    assert lines["data"] == f"{image_records}, 131 images of 2 classes, validated on 41 others"
    assert lines["steps"].startswith("16 in ")
    assert 0 <= float(lines["val accuracy"].rstrip("%")) <= 100


def check_line(result, line):
    """Did both ranks end with this line, and without a traceback of their own?"""
    assert result.returncode != 0
    for rank in (0, 1):
        assert f"[{rank}]<stderr>:{line}" in result.stderr
        assert f"[{rank}]<stderr>:Traceback" not in result.stderr


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_named_on_all_workers(horovodrun, image_folders, tmp_path):
    shutil.copytree(image_folders, tmp_path / "data")
    file = sorted((tmp_path / "data" / "train" / "flower").glob("*.jpg"))[0]
    file.write_bytes(file.read_bytes()[:500])
    result = horovodrun(2, image_training(tmp_path / "data", "--epochs", "1"))
    assert re.search(rf"\[0\]<stderr>:worker [01]: {file} is not an image that can be read", result.stderr)
    line = re.search(r"\[0\]<stderr>:(worker .*)", result.stderr)[1]
    check_line(result, line)


@pytest.mark.slow
def test_a_record_that_one_worker_cannot_use_ends_the_training(horovodrun, image_records, tmp_path):
    import tensorflow as tf

    shutil.copytree(image_records, tmp_path / "data")
    file = tmp_path / "data" / "train-00001-of-00003"
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(file))]
    records[9] = image_record(b"text", 1)  # only the first record of each file is looked at before training
    with tf.io.TFRecordWriter(str(file)) as writer:
        for record in records:
            writer.write(record)
    result = horovodrun(2, image_training(tmp_path / "data", "--classes", "2", "--epochs", "9"))
    assert result.returncode != 0
    assert f"<stderr>:{file}, record 9 (from 0), cannot be used: Unknown image file format" in result.stderr
    assert "<stderr>:Traceback" not in result.stderr


IMAGES = """
import sys
sys.path.insert(0, "examples")
import numpy as np, tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
tf.random.set_seed(hvd.rank())
import image_files, images

def pictures(dataset):
    return [image.numpy().tobytes() for image, _ in dataset.unbatch()]

folders, records = sys.argv[1:]
for root in (folders, records):
    found = image_files.find(root, 2)
    assert (found.train.total, found.train.share, found.validation.share) == (131, 65, 20), found

    # In validation, no image is seen twice.
    validation = images.validation_set(found.validation, 16, 8)
    assert [len(x) for x, _ in validation] == [8, 8, 4]
    both = sum(hvd.allgather_object(pictures(validation)), [])
    assert len({*both}) == 40

    # Each epoch of each worker has its own order, and no image of the other worker.
    sources = [found.train.read(e)[0].numpy() for e in found.train.elements(None)]
    first, second = hvd.allgather_object(sources)
    assert not {*first} & {*second} and len({*first, *second}) == 131, (len(first), len(second))
    batches = list(images.training_set(found.train, 16, 8, 8, range(0, 3), 7))
    assert len(batches) == 24 and batches[0][0].shape == [8, 16, 16, 3]
    assert all(0 < np.mean([y.numpy() for _, y in batches[i : i + 8]]) < 1 for i in (0, 8, 16))
    key = [np.concatenate([y.numpy() for _, y in batches[i : i + 8]]).tolist() for i in (0, 8, 16)]
    keys = sum(hvd.allgather_object(key), [])
    assert all(keys[i] != keys[j] for i in range(6) for j in range(i)), keys

    # A training that resumes gets the same images, other seeds get others.
    resumed = list(images.training_set(found.train, 16, 8, 8, range(1, 3), 7))
    for (x, y), (x2, y2) in zip(batches[8:], resumed):
        assert (x.numpy() == x2.numpy()).all() and (y.numpy() == y2.numpy()).all()
    other = next(iter(images.training_set(found.train, 16, 8, 8, range(1, 3), 8)))
    assert not (other[0].numpy() == resumed[0][0].numpy()).all()
print("went well")
"""


@pytest.mark.slow
def test_images_are_shared_out_and_resume(horovodrun, image_folders, image_records):
    result = horovodrun(2, ["-c", IMAGES, str(image_folders), str(image_records)], timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:went well", "[1]<stdout>:went well"]


FAULTS = """
import json, sys
sys.path.insert(0, "examples")
import horovod.tensorflow as hvd
hvd.init()
import image_files
for roots in json.loads(sys.argv[1]):
    try:
        image_files.find(roots[hvd.rank() % len(roots)], 2)
        text = "no error"
    except SystemExit as error:
        text = str(error)
    both = hvd.allgather_object(text)
    assert both[0] == both[1] and "\\n" not in text, both
    if hvd.rank() == 0:
        print(text, flush=True)
"""


@pytest.mark.slow
def test_folders_that_cannot_be_used_are_explained_on_all_workers(horovodrun, image_folders, image_records, tmp_path):
    def copy(name, source):
        return shutil.copytree(source, tmp_path / name)

    def damaged(name, change):
        change(copy(name, image_records))
        return tmp_path / name

    import tensorflow as tf

    def other_record(record):
        def write(root):
            with tf.io.TFRecordWriter(str(root / "train-00001-of-00003")) as writer:
                writer.write(record)

        return write

    image = next((image_folders / "train" / "china").iterdir()).read_bytes()
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat" / "train").mkdir(parents=True)
    (tmp_path / "flat" / "val").mkdir()
    shutil.rmtree(copy("fewer", image_folders) / "val" / "china")
    shutil.rmtree(copy("hollow", image_folders) / "val" / "china")
    (tmp_path / "hollow" / "val" / "china").mkdir()
    next((copy("other", image_folders) / "train" / "china").iterdir()).unlink()
    file = "train-00001-of-00003"
    first = f"{file}, record 0 (from 0), cannot be used: "
    cases = [
        ([tmp_path / "nowhere"], f"{tmp_path}/nowhere is not a folder: give the one that has 'train' and 'val' in it"),
        ([tmp_path / "empty"], "has neither folders 'train' and 'val' nor TFRecords 'train-00000-of-...'"),
        ([tmp_path / "flat"], "flat/train has no folders: put the images of each class into a folder"),
        ([tmp_path / "fewer"], "fewer/val has no folder 'china': train and val must have the same classes"),
        ([tmp_path / "hollow"], "hollow/val/china has no images: their names must end in .jpg, .jpeg, .png"),
        ([image_folders, tmp_path / "nowhere"], f"worker 1: {tmp_path}/nowhere is not a folder"),
        ([image_folders, tmp_path / "other"], "the workers do not find the same files"),
        ([damaged("missing", lambda root: (root / file).unlink())], f"{file} is missing"),
        ([damaged("cut", lambda root: os.truncate(root / file, 5000))], f"{file} is cut short, or not a TFRecord"),
        (
            [damaged("label", other_record(image_record(image, 3)))],
            f"{first}image/class/label must be one of 1 to 2, the",
        ),
        (
            [damaged("zero", other_record(image_record(image, 0)))],
            f"{first}image/class/label must be one of 1 to 2, the",
        ),
        ([damaged("text", other_record(image_record(b"text", 1)))], first),
        ([damaged("features", other_record(b""))], first),
        ([image_folders], "no error"),
    ]
    roots = json.dumps([[str(root) for root in case[0]] for case in cases])
    result = horovodrun(2, ["-c", FAULTS, roots], timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    assert len(lines) == len(cases), lines
    for line, (_, expected) in zip(lines, cases):
        assert expected in line


def test_custom_loop(horovodrun):
    small = "--data digits --steps 120 --compression int8"
    lines = report(horovodrun(2, ["examples/custom_loop.py", *small.split()]))
    assert lines["steps"].startswith("120 in ")
    assert lines["compressor"] == "int8" and "chosen" not in lines
    check_bytes(lines, 1_199_882, at_least=3.8)
    assert accuracy(lines) > 0.8


def recall(lines):
    found, popular = re.match(r"(\S+)% \(the most frequent ids: (\S+)%\)", lines["recall at ten"]).groups()
    return float(found), float(popular)


def test_keras_recommender_sends_rows(horovodrun):
    lines = report(horovodrun(2, ["examples/keras_recommender.py", "--steps", "60"]))
    found, popular = recall(lines)
    assert found > popular + 1.0
    count = int(re.search(r"([\d,]+) ids$", lines["data"]).group(1).replace(",", ""))
    assert count > 20_000
    sent = int(lines["sent per step"].split()[0].replace(",", ""))
    assert sent < 4 * (count + 1) * 64 / 4  # the dense gradient of the embedding, of which a ring sends as much
    assert float(lines["ratio"]) > 2


def test_keras_recommender_on_a_file(python, tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text("\n".join(" ".join(f"item-{(start + i) % 100}" for i in range(100)) for start in range(100)))
    arguments = ["--ids", str(file), "--steps", "100", "--lr", "0.01"]
    lines = report(python(["examples/keras_recommender.py", *arguments]), ranks=1)
    found, popular = recall(lines)
    assert lines["data"] == f"{file}, 100 ids"
    assert popular < 20 and found > 50  # what comes next follows from what came before


def test_keras_recommender_explains_wrong_ids(python, tmp_path):
    (tmp_path / "short.txt").write_text("one line\n")
    script = ["examples/keras_recommender.py", "--ids"]
    ends = one_by_one(python, [[*script, str(tmp_path / name)] for name in ("nowhere.txt", "short.txt")])
    for (status, _, err), message in zip(ends, ("cannot read", "must have at least two lines")):
        assert status == 2 and message in err.splitlines()[-1]


@pytest.mark.slow
def test_own_compressor_trains(horovodrun):
    lines = report(horovodrun(2, ["examples/own_compressor.py", "--epochs", "15"]))
    assert lines["compressor"] == "Ternary"
    check_bytes(lines, 784 * 128 + 128 + 128 * 10 + 10, at_least=18)
    assert accuracy(lines) > 0.85


def test_own_compressor_loses_less_than_there_is(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import tensorflow as tf
    from own_compressor import Ternary

    compressor = Ternary()
    random = np.random.default_rng(0)
    for n in (1, 499, 500, 501, 12345):
        for x in (random.normal(size=n), random.normal(size=n) ** 5, np.ones(n), np.eye(1, n)[0]):
            x = x.astype(np.float32)
            decoded = compressor.decompress(*compressor.compress(tf.constant(x)))
            assert np.linalg.norm(x - decoded) < np.linalg.norm(x)
            assert compressor.wire_bytes(n) == -(-n // 500) * 104
    payload, ctx = compressor.compress(tf.zeros([3, 7]))
    assert compressor.decompress(payload, ctx).shape == [3, 7]
    assert not tf.reduce_any(compressor.decompress(payload, ctx) != 0.0)
    assert len(inspect.getsource(Ternary).splitlines()) < 40


def weights_of(file):
    """All arrays of a checkpoint: weights and the optimizer's state."""
    arrays = {}
    with h5py.File(file) as saved:
        saved.visititems(lambda name, item: arrays.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    return arrays


def small_gpt(tmp_path):
    """The command for a training of a few seconds."""
    source = tmp_path / "source.py"
    source.write_bytes(b"".join(Path(module.__file__).read_bytes() for module in (argparse, inspect)))
    small = "--layers 1 --width 32 --context 16 --batch-size 32 --steps-per-epoch 20 --lr 0.01"
    small += f" --prompt import --sample 40 --compression hybrid:ratio=0.1,bits=4 --text {source}"
    return ["examples/keras_gpt.py", *small.split()]


def test_keras_gpt_resumes_as_if_it_had_never_stopped(horovodrun, python, tmp_path):
    script = small_gpt(tmp_path)

    def train(name, *more):
        return horovodrun(2, [*script, "--directory", str(tmp_path / name), *more])

    result = train("whole", "--epochs", "3")
    lines = report(result)
    assert lines["data"].startswith(f"{tmp_path / 'source.py'}, ") and lines["steps"].startswith("60 in ")
    assert 1 < float(lines["perplexity"].split()[0]) < 60  # of 256 bytes
    dense = 16 * 32 + 32 * 256 + 256 + 64 + 12 * 32**2 + 9 * 32 + 128
    check_bytes(lines, dense, at_least=2, rows=32 * 16 * (32 * 4 + 8))
    assert result.stdout.count("val_perplexity: ") == 3 and "learning rate warmup to 0.02" in result.stdout
    assert "\n[0]<stdout>:import" in result.stdout
    events = (tmp_path / "whole" / "tensorboard").rglob("*tfevents*")
    assert any(events) == bool(importlib.util.find_spec("tensorboard"))

    report(train("stopped", "--epochs", "2"))
    again = report(train("stopped", "--epochs", "3", "--resume"))
    assert again["steps"].startswith("20 in ") and again["perplexity"] == lines["perplexity"]
    whole, resumed = (weights_of(tmp_path / name / "epoch-0003.weights.h5") for name in ("whole", "stopped"))
    assert whole.keys() == resumed.keys() and sum(array.size for array in whole.values()) > 3 * 29_000
    for name, array in whole.items():
        assert np.array_equal(array, resumed[name]), name

    with zipfile.ZipFile(tmp_path / "stopped" / "model.keras") as model:  # its optimizer needs no Horovod
        assert json.loads(model.read("config.json"))["compile_config"]["optimizer"]["class_name"] == "Adam"
    faults = (
        ([], "stopped has checkpoints of another run: add --resume, or name another directory"),
        (["--resume", "--epochs", "4", "--width", "64"], "epoch-0003.weights.h5 is damaged or of another model: "),
        (["--resume", "--epochs", "3"], "stopped has 3 epochs already: set --epochs to more than that"),
    )
    ends = one_by_one(python, [[*script, "--directory", str(tmp_path / "stopped"), *more] for more, _ in faults])
    for (status, _, err), (_, error) in zip(ends, faults):
        assert status == 1 and error in err


def test_keras_gpt_in_mixed_precision(python, tmp_path):
    lines = report(python([*small_gpt(tmp_path), "--epochs", "1", "--mixed-precision"]), ranks=1)
    assert 1 < float(lines["perplexity"].split()[0]) < 60


def test_keras_gpt_explains_what_is_wrong(python):
    faults = (
        ("--directory README.md", "cannot write to --directory README.md: File exists\n"),
        ("--text nowhere.txt", "cannot read the text nowhere.txt: No such file or directory\n"),
        ("--batch-size 9999", "fewer than the 9999 of one batch on all workers: lower --batch-size or --context\n"),
    )
    ends = one_by_one(python, [["examples/keras_gpt.py", *arguments.split()] for arguments, _ in faults])
    for (status, _, err), (_, error) in zip(ends, faults):
        assert status == 1 and err.endswith(error)


def test_keras_gpt_explains_wrong_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import keras_gpt
    import text

    for arguments, error in (
        ("--epochs 0", "--epochs must be at least 1, got 0\n"),
        ("--width 190", "--width must be a multiple of 4, the number of attention heads, got 190\n"),
        ("--resume", "--resume needs the --directory of the run to continue\n"),
    ):
        monkeypatch.setattr(sys, "argv", ["keras_gpt.py", *arguments.split()])
        with pytest.raises(SystemExit):
            keras_gpt.arguments()
        assert capsys.readouterr().err.endswith(f"error: {error}")
    short = tmp_path / "short"
    short.write_bytes(99_999 * b"a")
    with pytest.raises(SystemExit, match=r"short is too short to train on: 99,999 bytes, at least 100,000 are needed$"):
        text.load(short)


def test_the_standard_library_is_the_same_text_each_time(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import text

    first, again = text.load(), text.load()
    assert len(first.train) + len(first.validation) <= 8_000_000 and len(first.validation) >= 300 * 64
    assert first.train.dtype == np.uint8 and np.array_equal(first.train, again.train)
    assert np.array_equal(first.validation, again.validation)
    source = first.train.tobytes()
    assert source.count(b"\ndef ") > 1000 and source.count(b"unittest.TestCase") < 100  # no tests


LOADERS = """
import sys, time
sys.path.insert(0, "examples")
import data, horovod.tensorflow as hvd, numpy as np
from tensorflow import keras
hvd.init()
data.SERVER_TIMEOUT = 2.0

def works():
    start = time.time()
    time.sleep(1)
    return start, time.time()

def fails():
    if hvd.rank() == 1:
        raise ValueError("of no use")
    return 1

def waits():
    print("Downloading data from a server that does not answer")
    time.sleep(100)

def downloads():
    print("Downloading data from a slow server")
    print("1%")
    time.sleep(4)
    return 2

times = hvd.allgather_object(data._in_turns(works)[0])
assert times[0][1] <= times[1][0], times
assert data._in_turns(fails) == (None, "of no use")
assert data._in_turns(waits) == (None, "no answer in 2 s")
assert data._in_turns(downloads) == (2, "")

images = np.full([9, 32, 32, 3], 255, np.uint8)
keras.datasets.cifar10.load_data = lambda: ((images, np.arange(9)[:, None]), (images, np.ones([9, 1])))
cifar = data.load("cifar10", (32, 32, 3))
assert cifar.name == "cifar10" and (cifar.x_test == 1.0).all() and cifar.y_test.shape == (9,)
assert data.share(cifar)[1].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]][hvd.rank()]

digits = data.load("digits", (32, 32, 3))
assert digits.x_train.shape == (1437, 32, 32, 3) and digits.x_test.shape == (360, 32, 32, 3)
assert digits.x_train.min() == 0 and digits.x_train.max() == 1
assert set(np.bincount(digits.y_test)) <= {34, 35, 36, 37}
print("went well")
"""


@pytest.mark.slow
def test_data_is_loaded_in_turns_and_all_workers_know_how_that_went(horovodrun):
    result = horovodrun(2, ["-c", LOADERS], timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:went well", "[1]<stdout>:went well"]
