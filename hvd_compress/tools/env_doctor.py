"""`hvd-compress doctor --env`: what is wrong with hosts, network and versions before the first job."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from ..common.text_table import aligned
from . import env_gather, env_rules
from .env_facts import Facts, per_host


def parser() -> argparse.ArgumentParser:
    """The command line, without `--env`."""
    result = argparse.ArgumentParser(
        prog="hvd-compress doctor --env",
        description="Say what is wrong with versions, network, cores and limits, and what to do. Alone: of this host; "
        "under horovodrun: of all ranks. The exit status is 1 if something serious was found alone, or if Horovod "
        "does not load, and else 0.",
        epilog="Examples: hvd-compress doctor --env --hosts host1,host2; horovodrun -np 2 hvd-compress doctor --env",
    )
    result.add_argument("--hosts", metavar="HOST,HOST", default="", help="try ssh to these, and compare their clocks")
    result.add_argument("--json", action="store_true", help="print the result as JSON, for scripts")
    return result


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    args = parser().parse_args(arguments)
    names = [name.partition(":")[0] for name in args.hosts.split(",") if name]
    ranks = env_gather.all_ranks(env_gather.host_facts(names))
    if not ranks:  # rank 0 has them
        return 0
    findings = env_rules.examine(ranks)
    if args.json:
        found = [finding._asdict() for finding in findings]
        print(json.dumps({"ranks": [dataclasses.asdict(each) for each in ranks], "findings": found}, indent=2))
    else:
        print("\n".join(report(ranks, findings)), flush=True)
    # horovodrun would end the job of a rank with status 1, and bury the findings under its own messages.
    return int(len(ranks) == 1 and any(finding.serious for finding in findings))


def report(ranks: Sequence[Facts], findings: Sequence[env_rules.Finding]) -> list[str]:
    """The lines that are printed."""
    first = ranks[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    lines = [f"{first.size} rank{'s' if first.size > 1 else ''} on {first.hosts} host{'s' if first.hosts > 1 else ''}"]
    lines += [versions, horovod(first), kernels(first), "", *aligned(table(per_host(ranks)), left=(0, 5)), ""]
    lines += [network(first), *(f"auto: {needs}" for needs in auto(first))]
    for finding in findings:
        lines += ["", f"{finding.problem}{'' if finding.serious else ' (a note)'}"]
        lines += [f"  what:   {finding.figures}", f"  advice: {finding.advice}"]
    if not findings:
        lines += ["", f"healthy: none of {len(env_rules.RULES)} rules found anything"]
    return lines


def horovod(facts: Facts) -> str:
    """What is known of Horovod's build, in one line."""
    if facts.horovod_error:
        return "Horovod: does not load"
    built_for = f", built for TensorFlow {facts.horovod_for}" if facts.horovod_for else ""
    started = f"; this job runs over {facts.controller}" if facts.controller else ""
    return f"Horovod: with {', '.join(facts.built)}{built_for}{started}"


def kernels(facts: Facts) -> str:
    """Which kernels the compressors use, in one line."""
    if facts.horovod_error:
        return "kernels: not known without Horovod"
    given = facts.settings.get("HVD_COMPRESS_KERNELS")
    why = "the default"
    if given:
        why = f"HVD_COMPRESS_KERNELS={given}"
    elif facts.native_missing:
        why = f"the native kernels {facts.native_missing}"
    elif facts.gpus:
        why = "the host has GPUs"
    return f"kernels: {facts.kernels} ({why})"


def table(hosts: Sequence[Facts]) -> list[list[str]]:
    """A row for each host, below the headings."""
    rows = [["host", "ranks", "cores", "threads", "GPUs", "interface", "open files", "clock"]]
    for facts in hosts:
        interface, threads = facts.interface(), str(facts.threads) if facts.threads else "cores"
        numbers = [str(facts.local_size), str(facts.cores), threads, str(facts.gpus)]
        rows.append([facts.host, *numbers, str(interface or "none"), str(facts.open_files), f"{facts.clock:+.3f} s"])
    return rows


def network(facts: Facts) -> str:
    """Which interface horovodrun has taken or would take."""
    if facts.taken:
        return f"network: horovodrun has taken {facts.taken}"
    others = " or ".join(each.name for each in facts.candidates()) or "none, there is no other"
    return f"network: on one host horovodrun takes lo, over several: {others}"


def auto(facts: Facts) -> list[str]:
    """What compression="auto" would do or need with these hosts."""
    lines = []
    if "HVD_COMPRESS_CALIBRATION" in facts.settings:
        lines.append(f"takes link and kernels from {facts.settings['HVD_COMPRESS_CALIBRATION']}")
    else:
        lines.append("measures link and kernels in its first step; hvd-compress calibrate does it beforehand")
    if facts.hosts > 1 and facts.local_size > 1:
        lines.append("for sums within hosts first, the script calls hvdc.init() in place of hvd.init()")
    return lines
