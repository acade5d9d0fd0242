"""The emulated hosts: do they have their own links, and does nothing of them stay?"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

NETLAB = str(ROOT / "benchmarks" / "netlab.py")
HOSTS = """
import horovod.tensorflow as hvd, os, socket, tensorflow as tf
hvd.init()
total = hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum).numpy()
address = socket.gethostbyname(socket.gethostname())
print("went well", hvd.rank(), hvd.size(), hvd.local_size(), total, address, flush=True)
"""

# The second host measures a round trip: connecting to the first host takes one.
ROUND_TRIP = """
import horovod.tensorflow as hvd, socket, tensorflow as tf, time
hvd.init()
with socket.create_server(("", 5000)) as server:
    hvd.allreduce(tf.constant(0.0), name="both_listen")
    start = time.monotonic()
    if hvd.rank() == 1:
        socket.create_connection(("10.77.0.1", 5000), 60).close()
    connected = time.monotonic()
    total = hvd.allreduce(tf.range(1e5) * (hvd.rank() + 1.0), op=hvd.Sum)
    right = bool(tf.reduce_all(total == 3 * tf.range(1e5)))
print("went well", hvd.rank(), connected - start, time.monotonic() - connected, right, flush=True)
"""
# The first host answers each datagram; the second one counts the answers to 400 of them.
DATAGRAMS = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
    if sys.argv[1] == "answer":
        end.bind(("", 5000))
        print("ready", flush=True)
        while True:
            end.sendto(*end.recvfrom(64))
    for i in range(400):
        end.sendto(b"%d" % i, ("10.77.0.1", 5000))
        time.sleep(0.001)
    end.settimeout(2)
    answers = set()
    try:
        while True:
            answers.add(end.recv(64))
    except socket.timeout:
        print(len(answers))
"""

pytestmark = pytest.mark.timeout(400)


def works():
    """Whether this machine lets us make network namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"hvdctest{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    link = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
    made = made and subprocess.run(link, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made


needs_root = pytest.mark.skipif(not works(), reason="needs root, iproute2 and network namespaces")


def left_over(pid):
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    found = [line.split()[0] for line in namespaces.splitlines() if line.startswith(f"hvdc{pid}")]
    return found + [path.name for path in Path("/etc/netns").glob(f"hvdc{pid}*")]


def start(*args):
    return subprocess.Popen(
        [sys.executable, NETLAB, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@needs_root
def test_each_host_has_an_address_and_its_workers(tmp_path):
    script = tmp_path / "hosts.py"
    script.write_text(HOSTS)
    process = start("--hosts", "2", "--workers-per-host", "2", "--", sys.executable, str(script))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    lines = sorted(line.partition("went well ")[2].split() for line in out.splitlines() if "went well" in line)
    expected = [[str(r), "4", "2", "10.0", f"10.77.0.{r // 2 + 1}"] for r in range(4)]
    assert lines == expected, out
    assert not left_over(process.pid)


@needs_root
def test_links_are_shaped_and_can_be_shaped_anew(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import netlab

    def shaping(lab):
        names = [lab._host(0), lab._host(1), lab._switch]
        error_text = [subprocess.run(["tc", "-n", n, "qdisc", "show"], capture_output=True, text=True) for n in names]
        return [line for text in error_text for line in text.stdout.splitlines() if "tbf" in line]

    with netlab.Netlab(2, "100mbit") as lab:
        assert len(shaping(lab)) == 4 and all("rate 100Mbit" in line for line in shaping(lab))
        lab.set_rate("10gbit")
        assert len(shaping(lab)) == 4 and all("rate 10Gbit" in line for line in shaping(lab))
        lab.set_rate(netlab.UNSHAPED)
        assert shaping(lab) == []
        assert left_over(os.getpid())
    assert not left_over(os.getpid())
    with pytest.raises(netlab.NetlabError, match="tc .* failed"), netlab.Netlab(1, "fast"):
        pass
    assert not left_over(os.getpid())


@needs_root
@pytest.mark.slow
def test_packets_take_as_long_as_the_delay(tmp_path):
    script = tmp_path / "round_trip.py"
    script.write_text(ROUND_TRIP)
    options = ["--rate", "100mbit", "--delay", "20ms", "--loss", "0.1%"]
    process = start(*options, "--", sys.executable, str(script))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    lines = sorted(line.partition("went well ")[2].split() for line in out.splitlines() if "went well" in line)
    assert [line[0] for line in lines] == ["0", "1"] and all(line[3] == "True" for line in lines), out
    _, connect, allreduce, _ = lines[1]
    # Horovod's ranks agree first: a request to rank 0, and its response.
    assert float(connect) >= 0.04 and float(allreduce) >= 0.04, out
    assert not left_over(process.pid)


@needs_root
def test_packets_are_lost_in_both_directions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import netlab

    with netlab.Netlab(2, "100mbit", loss=0.2) as lab:
        inside = [["ip", "netns", "exec", lab._host(i)] for i in range(2)]
        for i in range(2):  # no datagram waits for the answer to a lost ARP request
            shown = subprocess.run([*inside[1 - i], "ip", "link", "show", "eth0"], capture_output=True, text=True)
            hardware = shown.stdout.split("link/ether ")[1].split()[0]
            known = ["ip", "neighbor", "replace", lab.addresses[1 - i], "lladdr", hardware, "dev", "eth0"]
            subprocess.run([*inside[i], *known], check=True)
        run = [sys.executable, "-c", DATAGRAMS]
        with subprocess.Popen([*inside[0], *run, "answer"], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout.readline()
            client = subprocess.run([*inside[1], *run, "ask"], capture_output=True, text=True, timeout=120)
            server.kill()
    # 0.8 * 0.8 * 400 = 256; six standard deviations to each side.
    assert 198 <= int(client.stdout) <= 314, client.stderr


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_when_it_is_killed(number, tmp_path):
    command = ["sh", "-c", f"touch {tmp_path}/begun; sleep 1000"]
    process = start("--hosts", "2", "--rate", "1gbit", "--delay", "1ms", "--", *command)
    deadline = time.time() + 60
    while time.time() < deadline and not (tmp_path / "begun").exists():
        time.sleep(0.2)
    assert "h1" in "".join(left_over(process.pid))
    process.send_signal(number)
    process.wait(60)
    deadline = time.time() + 30
    while left_over(process.pid) and time.time() < deadline:
        time.sleep(0.2)
    assert not left_over(process.pid)


def test_what_it_cannot_do_is_said_in_one_line(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import netlab

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(netlab.NetlabError, match="needs root: sudo "):
        netlab.check_machine()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(netlab.NetlabError, match="ip, tc, taskset, bash not found: apt-get install iproute2"):
        netlab.check_machine()
