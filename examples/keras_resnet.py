"""Trains a residual network with compressed gradients and all of Horovod's Keras callbacks.

    horovodrun -np 2 python examples/keras_resnet.py
    horovodrun -np 8 python examples/keras_resnet.py --data-dir imagenet --model resnet50 --mixed-precision
    horovodrun -np 2 python examples/keras_resnet.py --data-dir pictures --directory run --resume
    horovodrun -np 2 python examples/keras_resnet.py --model resnet50 --synthetic --steps 20

ResNet-20 is trained on CIFAR-10 as by its authors (He et al., Deep Residual Learning for Image Recognition,
section 4.2, 2015). With --data-dir, images are read from folders or TFRecords in ImageNet's layouts (image_files.py),
and the training is that of Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677, section 5.1), with label
smoothing (Szegedy et al., arXiv 1512.00567). With --synthetic, images are random, to measure the time of a step.

With --directory, each epoch is saved, with the residuals of all workers. If the job is then started again with
--resume, it continues after the last one. With --data-dir it ends with the same weights to the bit as without the
interruption (with `auto`, if that chooses the same compressors).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import checkpoints
import common
import horovod.tensorflow.keras as hvd
import resnet
import resnet_data
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc

# The paper's 64,000 steps of 128 images are 164 epochs of CIFAR-10.
EPOCHS = {"cifar10": 164, "digits": 20, "--data-dir": 90}
# Where the learning rate is divided by ten, as parts of the training: He et al., section 4.2, and Goyal et al.
DECAYS = {"cifar10": (1 / 2, 3 / 4), "digits": (1 / 2, 3 / 4), "--data-dir": (1 / 3, 2 / 3, 8 / 9)}


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = common.arguments(
        "Train a residual network with compressed gradients.", "keras_resnet.py", 64, None,
        lr_default="0.05; with --data-dir 0.1 for 256 images",
    )  # fmt: skip
    parser.add_argument("--model", choices=["resnet20", "resnet50"], default="resnet20")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data", choices=["cifar10", "digits"], default="cifar10",
        help="cifar10 is downloaded; digits come with scikit-learn (default: %(default)s)",
    )  # fmt: skip
    source.add_argument("--data-dir", metavar="DIR", help="images in folders or TFRecords, as those of ImageNet")
    source.add_argument("--synthetic", action="store_true", help="random images")
    parser.add_argument("--classes", type=int, default=1000, help="of TFRecords (default: %(default)s)")
    parser.add_argument(
        "--image-size", type=int, help="with --data-dir or --synthetic (default: 224 for resnet50, 32 for resnet20)"
    )
    epochs = ", ".join(f"{count} for {name}" for name, count in EPOCHS.items())
    parser.add_argument("--epochs", type=int, help=f"default: {epochs}")
    parser.add_argument("--steps", type=int, help="train about this many steps, instead of --epochs")
    parser.add_argument("--warmup-epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--label-smoothing", type=float, help="default: 0.1 with --data-dir, 0 otherwise")
    parser.add_argument(
        "--mixed-precision", action="store_true", help="compute in float16 on a GPU and in bfloat16 on a CPU"
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="save each epoch here")
    parser.add_argument("--resume", action="store_true", help="continue after the last epoch in --directory")
    args = parser.parse_args()
    if args.model == "resnet50" and not (args.synthetic or args.data_dir):
        parser.error("resnet50 is too large for these data sets: add --data-dir or --synthetic")
    if args.resume and args.directory is None:
        parser.error("--resume needs the --directory of the run to continue")
    for name in ("batch_size", "classes", "image_size", "epochs", "steps", "warmup_epochs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    args.image_size = args.image_size or (224 if args.model == "resnet50" else 32)
    if args.lr is None:
        args.lr = 0.1 * args.batch_size / 256 if args.data_dir else 0.05
    if args.label_smoothing is None:
        args.label_smoothing = 0.1 if args.data_dir else 0.0
    return args


def main() -> None:
    """Trains and reports."""
    args = arguments()
    hvd.init()
    common.share_devices()
    keras.utils.set_random_seed(args.seed + hvd.rank())  # of CIFAR-10's shuffling and shifts: differs by worker
    if args.mixed_precision:
        on_gpu = bool(tf.config.get_visible_devices("GPU"))
        keras.mixed_precision.set_global_policy("mixed_float16" if on_gpu else "mixed_bfloat16")

    task = resnet_data.load(args)
    epochs, steps_per_epoch = args.epochs or EPOCHS.get(task.name, 1), max(1, task.share // args.batch_size)
    if args.steps:
        epochs = math.ceil(args.steps / steps_per_epoch)
        steps_per_epoch = args.steps // epochs
    first_epoch, weights = 0, None
    if args.directory is not None:
        first_epoch, weights = checkpoints.newest(args.directory, args.resume, epochs)

    lr = args.lr * hvd.size()
    warmup_epochs = min(args.warmup_epochs, max(1, epochs // 2))

    def decay(epoch: float) -> float:
        return 0.1 ** sum(epoch >= part * epochs for part in DECAYS.get(task.name, ()))

    model = {"resnet20": resnet.resnet20, "resnet50": resnet.resnet50}[args.model](task.classes, args.image_size)
    # Keras 2 does not save the rate with the weights, and the callbacks scale the momentum when it changes.
    if first_epoch > warmup_epochs:
        rate = lr * decay(first_epoch - 1)
    else:
        rate = lr / hvd.size() * (first_epoch * (hvd.size() - 1) / warmup_epochs + 1)
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), compression=args.compression)
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=args.label_smoothing)
    # Horovod cannot run inside XLA, so the training step must not be compiled.
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    if weights is not None:
        checkpoints.load(model, weights)

    callbacks = [
        hvdc.callbacks.BroadcastGlobalVariablesCallback(0),  # all start with the first worker's state
        resnet.AverageBatchNormalization(),  # all validate the same model
        hvdc.callbacks.MetricAverageCallback(),  # the callbacks below get the averages
        hvdc.callbacks.LearningRateWarmupCallback(lr, warmup_epochs, verbose=1),
        hvdc.callbacks.LearningRateScheduleCallback(lr, decay, start_epoch=warmup_epochs),
    ]
    if args.directory is not None:
        callbacks += checkpoints.saving(args.directory, resume=weights is not None)

    def one_hot(x, y):
        return x, tf.one_hot(y, task.classes)

    start = time.perf_counter()
    try:
        history = model.fit(
            task.training_set(steps_per_epoch, range(first_epoch, epochs)).map(one_hot),
            initial_epoch=first_epoch,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            validation_data=None if task.validation_set is None else task.validation_set.map(one_hot),
            callbacks=callbacks,
            shuffle=False,  # the datasets do it
            verbose=2 if hvd.rank() == 0 else 0,
        )
    except tf.errors.OpError as error:
        if "Horovod has been shut down" in str(error):
            raise SystemExit("another worker ended first: its message says why") from None
        if "IteratorGetNext" in str(error):  # it comes from the dataset
            task.check()
        raise
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:  # all workers have the same weights
        metrics = {}
        if task.validation_set is not None:
            metrics["val accuracy"] = f"{history.history['val_accuracy'][-1]:.2%}"
        if task.test_set is not None:
            x, y = task.test_set
            metrics["test accuracy"] = f"{model.evaluate(x, one_hot(x, y)[1], verbose=0)[1]:.2%}"
        common.report(
            optimizer,
            data=task.description,
            metrics=metrics,
            steps=steps_per_epoch * len(history.epoch),
            seconds=seconds,
            compression=args.compression,
        )


if __name__ == "__main__":
    main()
