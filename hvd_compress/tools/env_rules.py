"""What can be wrong with an environment: one function per fault, from the facts of all ranks to a line, or None.

A serious fault breaks the job or makes it slow; the others depend on what is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .env_facts import Facts, per_host, whose

_CLOCK = 1.0  # seconds: far more than a barrier takes
_SPARE_FILES = 256  # that a process has open besides one connection to each other rank, in both directions


class Rule(NamedTuple):
    """A fault."""

    name: str
    check: Callable[[Sequence[Facts]], str | None]  # what shows it, in one line; None if it is not there
    advice: str
    serious: bool = True


class Finding(NamedTuple):
    """A fault that is there."""

    problem: str
    figures: str
    advice: str
    serious: bool


def examine(ranks: Sequence[Facts]) -> list[Finding]:
    """What is wrong, in the order of the rules."""
    checked = ((rule, rule.check(ranks)) for rule in RULES)
    return [Finding(rule.name, figures, rule.advice, rule.serious) for rule, figures in checked if figures]


def _groups(ranks: Sequence[Facts], values: Sequence[str]) -> str | None:
    """Which ranks have which of these values, one for each rank, if they differ."""
    groups: dict[str, list[Facts]] = {}
    for facts, value in zip(ranks, values):
        groups.setdefault(value, []).append(facts)
    if len(groups) < 2:
        return None
    return "; ".join(f"{whose(ranks, members)}: {each or 'none'}" for each, members in groups.items())


def _differing(ranks: Sequence[Facts], tables: Sequence[Mapping[str, str]]) -> str | None:
    """For each name that has other values on some ranks than on others, who has which."""
    groups = {name: _groups(ranks, [table.get(name, "") for table in tables]) for table in tables for name in table}
    return " | ".join(f"{name}: {who}" for name, who in groups.items() if who) or None


def does_not_load(ranks: Sequence[Facts]) -> str | None:
    """TensorFlow or Horovod is missing, or cannot be loaded."""
    failed = [facts for facts in ranks if facts.horovod_error]
    return f"{whose(ranks, failed)}: {failed[0].horovod_error}" if failed else None


def another_tensorflow(ranks: Sequence[Facts]) -> str | None:
    """Horovod was built for another TensorFlow than the one that is installed."""
    wrong = [facts for facts in ranks if facts.horovod_for not in ("", facts.versions.get("tensorflow", ""))]
    if not wrong:
        return None
    has = wrong[0].versions.get("tensorflow", "none")
    return f"{whose(ranks, wrong)}: Horovod was built for TensorFlow {wrong[0].horovod_for}, installed is {has}"


def versions_differ(ranks: Sequence[Facts]) -> str | None:
    """Ranks have other versions than others."""
    return _differing(ranks, [facts.versions for facts in ranks])


def settings_differ(ranks: Sequence[Facts]) -> str | None:
    """Ranks have other settings of this package in their environment than others."""
    return _differing(ranks, [facts.settings for facts in ranks])


def kernels_differ(ranks: Sequence[Facts]) -> str | None:
    """Some ranks have native kernels, and others XLA's."""
    return _groups(ranks, [facts.kernels for facts in ranks])


def not_native(ranks: Sequence[Facts]) -> str | None:
    """A host without GPUs has no native kernels, and nobody has asked for the others."""
    without = [facts for facts in ranks if facts.native_missing and not facts.gpus and not facts.settings_error
               and "HVD_COMPRESS_KERNELS" not in facts.settings]  # fmt: skip
    return f"{whose(ranks, without)}: the native kernels {without[0].native_missing}" if without else None


def wrong_settings(ranks: Sequence[Facts]) -> str | None:
    """What a variable of this package in the environment names cannot be used."""
    wrong = [facts for facts in ranks if facts.settings_error]
    return f"{whose(ranks, wrong)}: {wrong[0].settings_error}" if wrong else None


def wrong_interface(ranks: Sequence[Facts]) -> str | None:
    """Hosts exchange gradients over an interface that is slow, or that other hosts cannot reach."""
    for facts in per_host(ranks):
        taken = facts.interface()
        if facts.hosts < 2 or not facts.taken or taken is None:
            continue
        faster = [each for each in facts.candidates() if not each.virtual and each.speed > taken.speed > 0]
        if taken.virtual:
            return f"host {facts.host} uses {taken}, which is an interface of this host only"
        if faster:
            return f"host {facts.host} uses {taken}, and has {max(faster, key=lambda each: each.speed)}"
        if facts.default_route not in ("", taken.name) and not taken.speed:
            return f"host {facts.host} uses {taken}, and other networks are reached through {facts.default_route}"
    return None


def ambiguous_interface(ranks: Sequence[Facts]) -> str | None:
    """Alone: horovodrun would choose among several interfaces, in no fixed order."""
    facts = ranks[0]
    candidates = facts.candidates()
    if facts.taken or len(candidates) < 2:
        return None
    return f"over several hosts, horovodrun takes any of {', '.join(map(str, candidates))} that all hosts have"


def mtu_differs(ranks: Sequence[Facts]) -> str | None:
    """The interfaces of two hosts send packets of different sizes."""
    used = [(facts, interface) for facts in per_host(ranks) if (interface := facts.interface())]
    return _groups([facts for facts, _ in used], [f"MTU {interface.mtu}" for _, interface in used])


def no_ssh(ranks: Sequence[Facts]) -> str | None:
    """Alone: horovodrun cannot start ranks on other hosts."""
    facts = ranks[0]
    failed = [f"{host}: {why}" for host, why in facts.reached.items() if why]
    if failed:
        return "; ".join(failed)
    return "there is no command ssh" if not (facts.taken or facts.controller or facts.has_ssh) else None


def own_name(ranks: Sequence[Facts]) -> str | None:
    """A host does not find its own name."""
    wrong = [facts for facts in per_host(ranks) if not facts.name_resolves]
    return f"no address for the host's own name, {', '.join(facts.host for facts in wrong)}" if wrong else None


def too_many_ranks(ranks: Sequence[Facts]) -> str | None:
    """A host has fewer cores than ranks, or fewer than their threads need."""
    for facts in per_host(ranks):
        if facts.local_size > facts.cores:
            return f"{facts.local_size} ranks on host {facts.host} share {facts.cores} cores"
        threads = facts.local_size * facts.threads
        if facts.local_size > 1 and threads > facts.cores:
            each = f"{facts.local_size} ranks with {facts.threads} threads each"
            return f"{each} on host {facts.host} share {facts.cores} cores"
    return None


def threads_not_set(ranks: Sequence[Facts]) -> str | None:
    """Each of several ranks of a host starts a thread for every core."""
    for facts in per_host(ranks):
        if 1 < facts.local_size <= facts.cores and not facts.threads and not facts.gpus:
            each = f"each of {facts.local_size} ranks on host {facts.host} starts {facts.cores} threads"
            return f"{each}; TF_NUM_INTRAOP_THREADS={facts.cores // facts.local_size} gives each its share"
    return None


def wrong_gpus(ranks: Sequence[Facts]) -> str | None:
    """GPUs that are shared, or that TensorFlow or Horovod cannot use."""
    for facts in per_host(ranks):
        if not facts.gpus:
            continue
        if facts.local_size > facts.gpus:
            return f"{facts.local_size} ranks on host {facts.host} share {facts.gpus} GPUs"
        if not facts.tensorflow_cuda:
            return f"host {facts.host} has {facts.gpus} GPUs, and its TensorFlow was built without CUDA"
    return None


def without_nccl(ranks: Sequence[Facts]) -> str | None:
    """Gradients pass through the memory of the host."""
    hosts = [facts for facts in per_host(ranks) if facts.gpus and facts.tensorflow_cuda and "nccl" not in facts.built]
    return f"{whose(ranks, hosts)} has GPUs, and Horovod was built without NCCL" if hosts else None


def clocks_differ(ranks: Sequence[Facts]) -> str | None:
    """The clocks of two hosts are not the same."""
    ahead = {facts.host: facts.clock for facts in per_host(ranks)} | dict(ranks[0].clocks)
    off = [f"{host} {abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}" for host, seconds in ahead.items()
           if abs(seconds) > _CLOCK]  # fmt: skip
    return f"compared with {ranks[0].host}: {', '.join(off)}" if off else None


def few_open_files(ranks: Sequence[Facts]) -> str | None:
    """A process may not open a connection to each other rank."""
    for facts in per_host(ranks):
        needed = 2 * facts.size + _SPARE_FILES
        if facts.open_files < needed:
            return f"host {facts.host} allows {facts.open_files} open files; {facts.size} ranks need about {needed}"
    return None


def little_locked_memory(ranks: Sequence[Facts]) -> str | None:
    """NCCL and MPI cannot register buffers with an InfiniBand device."""
    hosts = [facts for facts in per_host(ranks) if facts.rdma and 0 <= facts.locked_memory < 2**30]
    if not hosts:
        return None
    limit = hosts[0].locked_memory // 1024
    return f"{whose(ranks, hosts)} has {', '.join(hosts[0].rdma)}, and may lock {limit} kB of memory"


RULES: tuple[Rule, ...] = (
    Rule("TensorFlow or Horovod does not load", does_not_load,
         "install TensorFlow (pip install tensorflow), then Horovod for it (hvd-compress horovod install)"),
    Rule("Horovod of another TensorFlow", another_tensorflow,
         "build it for the one that is there: hvd-compress horovod install"),
    Rule("ranks of different versions", versions_differ,
         "install the same versions on all hosts, best the same environment, container image or shared folder; name "
         "the interpreter by its full path in the command of horovodrun"),
    Rule("ranks with different settings", settings_differ,
         "set the variable where horovodrun is started: it passes its environment on to all hosts"),
    Rule("wrong settings", wrong_settings,
         "correct the variable, or unset it"),
    Rule("ranks with different kernels", kernels_differ,
         "install hvd_compress with a C++ compiler on all hosts, or start horovodrun with HVD_COMPRESS_KERNELS=xla"),
    Rule("no native kernels", not_native,
         "install a C++ compiler (apt-get install g++) and then hvd_compress again: XLA's kernels take longer in the "
         "first step and in all others", serious=False),
    Rule("wrong network interface", wrong_interface,
         "name the right one: horovodrun --network-interfaces eth0 ..., and the same in NCCL_SOCKET_IFNAME"),
    Rule("several network interfaces", ambiguous_interface,
         "name the one that joins the hosts: horovodrun --network-interfaces eth0 ...", serious=False),
    Rule("MTU mismatch", mtu_differs,
         "set the same MTU on all hosts (ip link set dev eth0 mtu 1500), and on the switch: large packets are lost or "
         "cut in pieces otherwise, and a job hangs or is slow"),
    Rule("no ssh", no_ssh,
         "install it (apt-get install openssh-client), and let the hosts accept a key without a password (ssh-copy-id "
         "HOST); in Slurm, deploy/slurm does without. One host needs no ssh"),
    Rule("the host does not know its own name", own_name,
         "add it to /etc/hosts, with the address of the interface that joins the hosts"),
    Rule("oversubscribed cores", too_many_ranks,
         "start fewer ranks on a host, or set TF_NUM_INTRAOP_THREADS and OMP_NUM_THREADS to cores / ranks"),
    Rule("threads are not set", threads_not_set,
         "set TF_NUM_INTRAOP_THREADS, or tf.config.threading.set_intra_op_parallelism_threads in the script",
         serious=False),
    Rule("GPUs", wrong_gpus,
         "start one rank per GPU, with tensorflow[and-cuda], and let each see its own "
         "(tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU'))"),
    Rule("Horovod without NCCL", without_nccl,
         "hvd-compress horovod install --nccl: without it, gradients are copied to the host and back", serious=False),
    Rule("clocks differ", clocks_differ,
         "let all hosts ask the same time server (chrony, ntp): logs, traces and certificates depend on it",
         serious=False),
    Rule("few open files", few_open_files,
         "raise the limit: ulimit -n 65536, in /etc/security/limits.conf or in the unit that starts the job"),
    Rule("little locked memory", little_locked_memory,
         "ulimit -l unlimited, in /etc/security/limits.conf or in the unit that starts the job"),
)  # fmt: skip
