"""A switch in user space that delays frames and loses some of them; `netlab.py --delay --loss` runs it.

The kernel's own emulation of delay and loss, netem, is not in every kernel. This process reads the frames of all ports
from packet sockets, waits, and sends each to the port of its receiver. The ports' traffic shaping (tc) follows.

A frame is as large as the hosts' network cards make it. By default these leave the division of large TCP segments to
others, so that one frame has up to 64 KiB (`netlab` limits it to one packet where frames are lost).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Sequence

# From linux/if_ether.h, linux/if_packet.h and asm/socket.h; Python has no names for them.
ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 3, 263, 15, 23, 32, 33
BUFFER_BYTES = 2**26
# A frame follows the header virtio_net_hdr, which says what its network card still has to do: checksums, segments.
HEADER_BYTES = 10
FRAME_BYTES = 2**17
AT_ONCE = 32  # frames read from a port before others are sent


def open_port(device: str) -> socket.socket:
    """A socket with all frames that arrive at a network device."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((device, ETH_P_ALL))
    return port


def relay(ports: Sequence[socket.socket], delay: float, loss: float, seed: int) -> None:
    """Passes on frames for ever.

    Args:
        ports: The sockets of `open_port`.
        delay: Seconds from the arrival of a frame until it is sent.
        loss: The probability with which a frame is lost.
        seed: Of the random numbers that decide which.
    """
    rng = random.Random(seed)
    port_of: dict[bytes, socket.socket] = {}  # by hardware address
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()  # by the time to send
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ports, [], [], pause)
        for port in readable:
            # Errors: nothing is left to read, or the link is down.
            with contextlib.suppress(OSError):
                for _ in range(AT_ONCE):
                    frame = port.recv(HEADER_BYTES + FRAME_BYTES)
                    receiver, sender = struct.unpack_from("6s6s", frame, HEADER_BYTES)
                    port_of[sender] = port
                    if rng.random() >= loss:
                        due = time.monotonic() + delay
                        # Frames for all, or for an unknown address, go to all other ports.
                        to = [port_of[receiver]] if receiver in port_of else [other for other in ports if other != port]
                        waiting.extend((due, other, frame) for other in to)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, port, frame = waiting.popleft()
            # As in a switch, a frame is lost if the port's queue is full or its link is down.
            with contextlib.suppress(OSError):
                port.send(frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+", help="network devices, the ports of the switch")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds (default: %(default)s)")
    parser.add_argument("--loss", type=float, default=0.0, help="probability (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    ports = [open_port(device) for device in args.devices]
    print("ready", flush=True)
    relay(ports, args.delay, args.loss, args.seed)


if __name__ == "__main__":
    main()
