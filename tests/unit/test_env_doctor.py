"""hvd-compress doctor --env: each fault is found where it is planted, and not where it is not."""

import dataclasses
import json

import pytest

from hvd_compress.tools import env_doctor, env_gather, env_rules
from hvd_compress.tools.env_facts import Facts, Interface, whose

LO = Interface("lo", "127.0.0.1", 65536, virtual=True)
ETH = Interface("eth0", "10.0.0.1", 1500, 10000)
DOCKER = Interface("docker0", "172.17.0.1", 1500, virtual=True)
VERSIONS = {"python": "3.11", "tensorflow": "2.21.0", "keras": "3.15.1", "horovod": "0.28.1"}
ALONE = Facts(
    "a", versions=VERSIONS, horovod_for="2.21.0", built=("gloo",), interfaces=(LO, ETH), default_route="eth0", cores=8
)
PLACES = [("a", 0), ("a", 1), ("b", 2), ("b", 3)]


def job(**changes):
    """Four ranks on two hosts; `changes` are of the ranks on host b."""
    rank = dataclasses.replace(ALONE, size=4, local_size=2, hosts=2, taken="eth0", controller="gloo", threads=4)
    ranks = [dataclasses.replace(rank, host=host, rank=number) for host, number in PLACES]
    return [*ranks[:2], *(dataclasses.replace(each, **changes) for each in ranks[2:])]


def found(ranks):
    return {finding.problem: finding for finding in env_rules.examine(ranks)}


def test_healthy():
    assert found([ALONE]) == {} and found(job()) == {}
    assert "healthy" in env_doctor.report([ALONE], [])[-1]


# The fault, what is planted, and what must stand in the line about it.
PLANTED = {
    "wrong network interface": ({"taken": "docker0", "interfaces": (LO, ETH, DOCKER)}, "host b uses docker0"),
    "oversubscribed cores": ({"cores": 1}, "2 ranks on host b share 1 cores"),
    "Horovod of another TensorFlow": ({"horovod_for": "2.20.0"}, "built for TensorFlow 2.20.0, installed is 2.21.0"),
    "ranks of different versions": (
        {"versions": {**VERSIONS, "keras": "3.10.0"}},
        "keras: ranks 0, 1 (host a): 3.15.1; ranks 2, 3 (host b): 3.10.0",
    ),
    "MTU mismatch": (
        {"interfaces": (LO, dataclasses.replace(ETH, mtu=9000))},
        "ranks 0 (host a): MTU 1500; ranks 2 (host b): MTU 9000".replace("ranks", "rank"),
    ),
    "TensorFlow or Horovod does not load": ({"horovod_error": "No module named 'horovod'"}, "No module named"),
    "ranks with different settings": ({"settings": {"HVD_COMPRESS": "int8"}}, "ranks 0, 1 (host a): none"),
    "wrong settings": ({"settings_error": "HVD_COMPRESS: unknown"}, "ranks 2, 3 (host b): HVD_COMPRESS: unknown"),
    "ranks with different kernels": ({"kernels": "xla"}, "ranks 0, 1 (host a): native; ranks 2, 3 (host b): xla"),
    "no native kernels": ({"native_missing": "are not built: x"}, "2, 3 (host b): the native kernels are not built: x"),
    "the host does not know its own name": ({"name_resolves": False}, "own name, b"),
    "GPUs": ({"gpus": 1, "tensorflow_cuda": True, "built": ("gloo", "nccl")}, "2 ranks on host b share 1 GPUs"),
    "Horovod without NCCL": ({"gpus": 2, "tensorflow_cuda": True}, "without NCCL"),
    "clocks differ": ({"clock": -3.0}, "b 3.0 s behind"),
    "few open files": ({"open_files": 256}, "host b allows 256 open files"),
    "little locked memory": ({"rdma": ("mlx5_0",), "locked_memory": 65536}, "mlx5_0, and may lock 64 kB"),
    "threads are not set": ({"threads": 0}, "each of 2 ranks on host b starts 8 threads; TF_NUM_INTRAOP_THREADS=4"),
}  # fmt: skip


@pytest.mark.parametrize("problem", PLANTED)
def test_planted_on_one_of_two_hosts(problem):
    changes, figures = PLANTED[problem]
    findings = found(job(**changes))
    assert list(findings) == [problem]
    assert figures in findings[problem].figures and findings[problem].advice


def test_no_ssh():
    problem = found([dataclasses.replace(ALONE, has_ssh=False)])["no ssh"]
    assert problem.serious and "ssh-copy-id" in problem.advice
    unreachable = dataclasses.replace(ALONE, reached={"b": "Permission denied (publickey).", "c": ""})
    assert found([unreachable])["no ssh"].figures == "b: Permission denied (publickey)."
    assert found(job(has_ssh=False)) == {}  # the job runs: something else has started it


def test_every_rule_has_a_planted_fault():
    assert {rule.name for rule in env_rules.RULES} == {*PLANTED, "no ssh", "several network interfaces"}


def test_which_interface():
    several = dataclasses.replace(ALONE, interfaces=(LO, DOCKER, ETH))
    problem = found([several])["several network interfaces"]
    assert not problem.serious and "docker0" in problem.figures and "eth0" in problem.figures
    assert "lo (" not in problem.figures
    fast = Interface("ib0", "10.1.0.1", 2044, 100000)
    slow = job(interfaces=(LO, ETH, fast))
    assert "has ib0 (10.1.0.1, MTU 2044, 100 Gbit/s)" in found(slow)["wrong network interface"].figures
    assert "wrong network interface" in found(job(taken="lo"))
    one_host = [dataclasses.replace(each, host="a", hosts=1, local_size=4, taken="lo", threads=2) for each in job()]
    assert found(one_host) == {}


def test_threads_of_all_ranks_of_a_host_count():
    assert "2 ranks with 8 threads each on host b share 8 cores" in (
        found(job(threads=8))["oversubscribed cores"].figures
    )


def test_clocks_of_hosts_that_ssh_reaches():
    problem = found([dataclasses.replace(ALONE, reached={"b": ""}, clocks={"b": 120.0})])["clocks differ"]
    assert problem.figures == "compared with a: b 120.0 s ahead"


def test_the_clock_of_a_busy_rank():
    """It reads its clock late in one round; the clocks are compared by the best one."""
    ranks = env_gather.together([(ALONE, [10.0, 11.0, 12.0]), (job()[2], [15.0, 11.01, 12.5])])
    assert [round(each.clock, 3) for each in ranks] == [0.0, 0.01] and {each.hosts for each in ranks} == {2}


def test_route_with_the_lowest_metric():
    table = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "eth1\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\t0\t0\t0\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth2\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert env_gather.default_route(table) == "eth0"
    assert env_gather.default_route(table.splitlines()[0]) == ""


def test_this_host(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    monkeypatch.setenv("HVD_COMPRESS", "topkk")
    facts = env_gather.host_facts(["nowhere.invalid"])
    loopback = next(each for each in facts.interfaces if each.name == "lo")
    assert loopback.address == "127.0.0.1" and loopback.virtual
    assert not facts.has_ssh and facts.reached["nowhere.invalid"]
    assert facts.threads == 3 and facts.horovod_for == facts.versions["tensorflow"]
    assert "unknown compressor 'topkk'" in facts.settings_error
    monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(tmp_path / "none.json"))
    assert "none.json cannot be read here" in env_gather.host_facts().settings_error


def test_ssh_and_the_clock_of_another_host(monkeypatch, tmp_path):
    text = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = -b ] || { echo "no date here"; exit; }\n'
    (tmp_path / "ssh").write_text(text + "echo $(($(/bin/date +%s) + 3600)).5\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    why, ahead = env_gather.reach("-b")  # a host, and no option
    assert why == "" and ahead == pytest.approx(3600, abs=60)
    assert env_gather.reach("c") == ("ssh works, but `date +%s.%N` printed no time", 0.0)


def test_the_page(monkeypatch, capsys):
    ranks = job(**PLANTED["MTU mismatch"][0])
    monkeypatch.setattr(env_gather, "host_facts", lambda hosts: ALONE)
    monkeypatch.setattr(env_gather, "all_ranks", lambda facts: ranks)
    assert env_doctor.main([]) == 0  # horovodrun would add its own messages to any other status
    out = capsys.readouterr().out
    assert "4 ranks on 2 hosts" in out and "built for TensorFlow 2.21.0" in out and "MTU mismatch\n" in out
    assert "\nkernels: native (the default)\n" in out
    assert "auto: measures link and kernels in its first step" in out and "hvdc.init()" in out
    assert env_doctor.main(["--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["ranks"]) == 4 and result["findings"][0]["problem"] == "MTU mismatch"
    monkeypatch.setattr(env_gather, "all_ranks", lambda facts: [dataclasses.replace(ALONE, has_ssh=False)])
    assert env_doctor.main([]) == 1 and "no ssh" in capsys.readouterr().out
    monkeypatch.setattr(env_gather, "all_ranks", lambda facts: [])  # another rank than the first
    assert env_doctor.main([]) == 0 and capsys.readouterr().out == ""


def test_ranks_in_words():
    many = [dataclasses.replace(ALONE, rank=number, host=f"h{number % 2}") for number in range(9)]
    assert whose(many, many) == "ranks 0, 1, 2, 3, 4, 5 and 3 more (hosts h0, h1)"
    assert whose([ALONE], [ALONE]) == "this host"
