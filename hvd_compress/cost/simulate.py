"""Simulates a collective on any network: messages are flows that share the links on their paths.

The network is a networkx graph whose edges have the attributes `alpha` (seconds per message) and `beta` (seconds per
byte). In an undirected graph each edge carries both directions at once. A message waits for the sum of the alphas on
its path, then flows. Flows on the same edge share it max-min fairly, as TCP does in the long run (Bertsekas and
Gallager 1992, section 6.5.2). Needs networkx.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .link import Link

if TYPE_CHECKING:
    import networkx

Edge = tuple[Hashable, Hashable]


class Message(NamedTuple):
    """A message from one node to another."""

    source: Hashable
    target: Hashable
    nbytes: float


Rounds = Sequence[Sequence[Message]]


def simulate(graph: networkx.Graph, rounds: Rounds) -> float:
    """Seconds until the last message has arrived.

    Args:
        graph: A directed or undirected graph whose edges have `alpha` and `beta`.
        rounds: The messages of each round. A node starts to send those of a round when all messages that it sends and
            receives in earlier rounds have arrived; it does not wait for other nodes.

    Raises:
        ValueError: An edge lacks `alpha` or `beta`, or a message's nodes are not connected.
    """
    for source, target, data in graph.edges(data=True):
        if "alpha" not in data or "beta" not in data:
            raise ValueError(f"simulate: the edge from {source} to {target} needs alpha and beta")
    pending = [
        _Flow(r, message, message.nbytes, *_route(graph, message))
        for r, messages in enumerate(rounds)
        for message in messages
    ]
    now = 0.0
    while pending:
        first: dict[Hashable, int] = {}  # the round that each node is in
        for flow in pending:
            for node in (flow.message.source, flow.message.target):
                first.setdefault(node, flow.round)
        active = [flow for flow in pending if first[flow.message.source] == first[flow.message.target] == flow.round]
        rates = _fair_rates(graph, [flow for flow in active if flow.latency <= 0.0])
        step = min(
            flow.latency if flow.latency > 0.0 else flow.left / rates[flow] if flow.left else 0.0 for flow in active
        )
        now += step
        for flow in active:
            if flow.latency > 0.0:
                flow.latency = 0.0 if flow.latency - step <= 1e-15 else flow.latency - step
            else:
                flow.left -= step * rates[flow] if math.isfinite(rates[flow]) else flow.left
        arrived = {f for f in active if f.latency <= 0.0 and f.left <= 1e-9 * (1.0 + f.message.nbytes)}
        pending = [flow for flow in pending if flow not in arrived]
    return now


@dataclasses.dataclass(eq=False)
class _Flow:
    """A message that has not arrived yet."""

    round: int
    message: Message
    left: float  # bytes
    path: list[Edge]
    latency: float


def _route(graph: Any, message: Message) -> tuple[list[Edge], float]:
    import networkx

    source, target, nbytes = message
    try:
        nodes = networkx.shortest_path(graph, source, target, lambda a, b, data: data["alpha"] + nbytes * data["beta"])
    except (networkx.NetworkXNoPath, networkx.NodeNotFound):
        raise ValueError(f"simulate: no way leads from {source} to {target}") from None
    path = list(zip(nodes, nodes[1:]))
    return path, sum(graph.edges[edge]["alpha"] for edge in path)


def _fair_rates(graph: Any, flows: Sequence[_Flow]) -> dict[_Flow, float]:
    """Bytes per second of each flow: the edge with the smallest share per flow is divided first."""
    rates: dict[_Flow, float] = {}
    members: dict[Edge, list[_Flow]] = {}
    for flow in flows:
        for edge in flow.path:
            members.setdefault(edge, []).append(flow)
    betas = {edge: graph.edges[edge]["beta"] for edge in members}
    room = {edge: 1.0 / beta if beta > 0 else math.inf for edge, beta in betas.items()}
    while len(rates) < len(flows):
        shares = {
            edge: room[edge] / count
            for edge, through in members.items()
            if (count := sum(flow not in rates for flow in through))
        }
        narrowest = min(shares, key=lambda edge: shares[edge], default=None)
        if narrowest is None or math.isinf(shares[narrowest]):
            break
        for flow in members[narrowest]:
            if flow not in rates:
                rates[flow] = shares[narrowest]
                for edge in flow.path:
                    room[edge] -= shares[narrowest]
    return {**dict.fromkeys(flows, math.inf), **rates}


def switch(nodes: Sequence[Hashable], link: Link) -> networkx.DiGraph:
    """A switch to which each node has a link for each direction; alpha counts on the way up."""
    import networkx

    graph = networkx.DiGraph()
    for node in nodes:
        graph.add_edge(node, "switch", alpha=link.alpha, beta=link.beta)
        graph.add_edge("switch", node, alpha=0.0, beta=link.beta)
    return graph


def fat_tree(nodes: Sequence[Hashable], link: Link, per_leaf: int, oversubscription: float) -> networkx.DiGraph:
    """Leaf switches of `per_leaf` nodes each, as in `switch`, and a core to which each leaf has one wide link.

    See `hvdc.cost.FatTree`.
    """
    import networkx

    graph = networkx.DiGraph()
    for i, node in enumerate(nodes):
        leaf = ("leaf", i // per_leaf)
        graph.add_edge(node, leaf, alpha=link.alpha, beta=link.beta)
        graph.add_edge(leaf, node, alpha=0.0, beta=link.beta)
        for edge in ((leaf, "core"), ("core", leaf)):
            graph.add_edge(*edge, alpha=0.0, beta=link.beta * oversubscription / per_leaf)
    return graph


def ring_allreduce(nodes: Sequence[Hashable], nbytes: float) -> list[list[Message]]:
    """2 (n - 1) rounds, in which each node sends its neighbour m / n bytes."""
    return 2 * ring_allgather(nodes, nbytes / len(nodes))


def ring_allgather(nodes: Sequence[Hashable], nbytes: float) -> list[list[Message]]:
    """In each of n - 1 rounds each node sends its neighbour m bytes."""
    n = len(nodes)
    return [[Message(nodes[i], nodes[(i + 1) % n], nbytes) for i in range(n)] for _ in range(n - 1)]


def pairwise_alltoall(nodes: Sequence[Hashable], nbytes: float) -> list[list[Message]]:
    """In round s of n - 1 each node sends m / n bytes to the node s places ahead."""
    n = len(nodes)
    return [[Message(nodes[i], nodes[(i + shift) % n], nbytes / n) for i in range(n)] for shift in range(1, n)]


def tree_allreduce(nodes: Sequence[Hashable], nbytes: float) -> list[list[Message]]:
    """Recursive doubling: log2 n rounds, in which partners at distance 1, 2, 4, ... exchange m bytes.

    Raises:
        ValueError: The number of nodes is not a power of two.
    """
    return [[Message(*pair, nbytes) for pair in pairs] for pairs in _partners(nodes)]


def tree_allgather(nodes: Sequence[Hashable], nbytes: float) -> list[list[Message]]:
    """Recursive doubling: partners exchange all they have received, m, 2 m, 4 m, ... bytes.

    Raises:
        ValueError: The number of nodes is not a power of two.
    """
    return [[Message(*pair, nbytes * 2**i) for pair in pairs] for i, pairs in enumerate(_partners(nodes))]


def _partners(nodes: Sequence[Hashable]) -> list[list[Edge]]:
    n = len(nodes)
    if n & (n - 1):
        raise ValueError(f"recursive doubling needs a power of two of nodes, got {n}")
    return [[(nodes[i], nodes[i ^ (1 << bit)]) for i in range(n)] for bit in range(n.bit_length() - 1)]


def star_allreduce(nodes: Sequence[Hashable], server: Hashable, nbytes: float) -> list[list[Message]]:
    """All nodes send m bytes to the server, which sends as many back to each."""
    return [[Message(node, server, nbytes) for node in nodes], [Message(server, node, nbytes) for node in nodes]]
