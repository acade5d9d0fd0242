"""powersgd against PyTorch DistributedDataParallel's PowerSGD hook: the exchange of one step's gradients.

    pip install torch --index-url https://download.pytorch.org/whl/cpu
    sudo python benchmarks/netlab.py --hosts 2 --rate 1gbit -- python benchmarks/powersgd_peers.py --label "at 1 gbit"

Runs under horovodrun. Both libraries run in the same processes, over Gloo, with one thread each, interleaved in every
round. Both have the same gradients, each in its own order of dimensions. This package reduces them as
DistributedOptimizer does: matrices as factors, the rest uncompressed, with residuals and factors kept. On
    PyTorch's side,
a DistributedDataParallel model with these parameters has the hook (warm start, error feedback). Its backward pass only
passes on existing gradients. A time is from a barrier until all reduced gradients are available, on the slowest worker.
For comparison, the same backward pass is timed on an unwrapped model without the hook.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import common
import numpy as np

from hvd_compress.tools.models import MODELS

RANKS = (1, 4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50", help="default: %(default)s")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, metavar="R", help="default: 1 4")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    return common.parse(parser)


class Peer:
    """PyTorch's side: a model with given gradients."""

    def __init__(self, gradients: list[np.ndarray]) -> None:
        import torch

        # Kernels of Keras (height, width, in, out) are PyTorch's (out, in, height, width).
        order = {4: (3, 2, 0, 1), 2: (1, 0)}
        self._given = [torch.from_numpy(np.ascontiguousarray(np.transpose(g, order.get(g.ndim)))) for g in gradients]
        self._torch = torch

    def _model(self) -> Any:
        torch, given = self._torch, self._given

        class Given(torch.autograd.Function):
            """A function with the given gradient, independent of its input."""

            @staticmethod
            def forward(ctx: Any, parameter: Any, i: int) -> Any:
                ctx.i = i
                return parameter.new_zeros(())

            @staticmethod
            def backward(ctx: Any, incoming: Any) -> Any:
                return given[ctx.i], None

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weights = torch.nn.ParameterList([torch.zeros_like(g) for g in given])

            def forward(self) -> Any:
                total = torch.zeros(())
                for i, weight in enumerate(self.weights):
                    total = total + Given.apply(weight, i)
                return total

        return Model()

    def alone(self) -> Callable[[], Any]:
        """The backward pass without an exchange."""
        return self._step(self._model())

    def powersgd(self, rank: int) -> Callable[[], Any]:
        """One step of the hook."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        # One bucket: with several, the hook's callbacks start collectives in a different order on each worker over
        # Gloo, and DDP ends with an error. There is no computation here that several buckets could overlap with.
        whole = 1 + sum(4 * g.numel() for g in self._given) // 2**20
        model = self._torch.nn.parallel.DistributedDataParallel(self._model(), bucket_cap_mb=whole)
        state = hooks.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            use_error_feedback=True,
            warm_start=True,
        )
        model.register_comm_hook(state, hooks.powerSGD_hook)
        return self._step(model)

    def _step(self, model: Any) -> Callable[[], Any]:
        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            model().backward()

        return step


def begin_torch(rank: int, size: int, address: str, port: int) -> None:
    """Opens PyTorch's own connections between the same hosts."""
    import torch.distributed

    if "GLOO_SOCKET_IFNAME" not in os.environ and any(name == "eth0" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)


def address_of(rank: int) -> tuple[str, int]:
    """The address of rank 0, and a port that is free there, to be sent to the other ranks."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        return socket.gethostbyname(socket.gethostname()), listening.getsockname()[1]


def main() -> None:
    args = arguments()
    try:
        import torch
    except ImportError:
        sys.exit("powersgd_peers needs PyTorch: pip install torch --index-url https://download.pytorch.org/whl/cpu")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_compress.tools.recorded import gradients
    from hvd_compress.tools.timed_exchange import Method, barrier

    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    address, port = hvd.broadcast_object(address_of(0) if hvd.rank() == 0 else None, 0)
    begin_torch(hvd.rank(), hvd.size(), address, port)

    shapes = MODELS[args.model]()
    values = gradients(shapes, hvd.rank())
    variables = [tf.Variable(value) for value in values]
    peer = Peer(values)
    methods: dict[str, Callable[[], Any]] = {"torch, no exchange": peer.alone()}
    for rank in args.ranks:
        ours = Method(f"powersgd:rank={rank}", variables)

        def run(step: Callable[[], Any] = ours.run) -> None:
            for gradient in step():
                gradient.numpy()

        methods[f"powersgd:rank={rank}"] = run
        methods[f"DDP PowerSGD rank {rank}"] = peer.powersgd(rank)

    show = hvd.rank() == 0
    for method in common.progress(list(methods.values()), "first steps", show):
        for _ in range(5):  # DDP rebuilds its buckets after one step, and starts to use the hook after two more
            method()
    times = common.interleave(methods, args.rounds, barrier, show)
    names = list(methods)
    slowest = hvd.allreduce(tf.constant([times[name] for name in names], tf.float64), op=hvd.Max, name="times")
    torch.distributed.destroy_process_group()
    if hvd.rank() != 0:
        return
    seconds = dict(zip(names, slowest.numpy().tolist()))
    stats = {name: common.summary(row) for name, row in seconds.items()}
    rows = []
    for name in names:
        rank = name.rpartition("=")[2]
        theirs = stats.get(f"DDP PowerSGD rank {rank}") if name.startswith("powersgd") else None
        faster = f"{theirs['median'] / stats[name]['median']:.2f}" if theirs else ""
        rows.append([name, common.milliseconds(stats[name]), faster])
    parameters = sum(math.prod(shape) for shape in shapes)
    versions = f"TensorFlow {tf.__version__}, PyTorch {torch.__version__}"
    title = f"{args.model}, {parameters / 1e6:.2f}M parameters, {hvd.size()} workers {args.label}; {versions}"
    common.print_table(title, ["method", "ms, median (quartiles)", "times faster than DDP"], rows)
    result = {
        "benchmark": "powersgd_peers", "model": args.model, "workers": hvd.size(), "label": args.label,
        "torch": torch.__version__, "methods": {name: {**stats[name], "seconds": seconds[name]} for name in names},
    }  # fmt: skip
    common.save(args.json, result)


if __name__ == "__main__":
    main()
