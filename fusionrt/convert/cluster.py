"""Clusters: which calls of a graph become one kernel.

A cluster is a set of members (see `members`) of one shape, convex: no path leads out of it and back into it,
so that it can run as one. It grows along the graph: a call joins the clusters of its operands as long as
that is so. At most one member works on rows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from fusionrt.convert.effects import Facts, value
from fusionrt.convert.graph import Edits, is_tensor, ordered, same
from fusionrt.convert.members import Member, member

MOST_OPERANDS = 16


class Cluster:
    """Sets of nodes are bit masks of their positions; `reach` is everything that it needs beside itself."""

    def __init__(self, first: Member, facts: Facts) -> None:
        t = value(first.node)
        self.shape, self.device, self.region = t.shape, t.device, facts.region[first.node]
        self.members: list[Member] = []
        self.mask = self.reach = 0

    @property
    def nodes(self) -> list[Node]:
        return [m.node for m in self.members]

    @property
    def row(self) -> Member | None:
        return next((m for m in self.members if m.row_dims), None)

    @property
    def results(self) -> list[Node]:
        """The values that others use."""
        inside = set(self.nodes)
        return [n for n in self.nodes if any(u not in inside for u in n.users)]

    def operands(self, *more: Node) -> list[Node]:
        """What it reads, in the order in which it does."""
        inside = {*self.nodes, *more}
        read = (a for n in (*self.nodes, *more) for a in n.all_input_nodes)
        return list(dict.fromkeys(a for a in read if a not in inside))

    def takes(self, made: Member, facts: Facts) -> bool:
        t = value(made.node)
        return (t.device == self.device and facts.region[made.node] == self.region
                and same(t.shape, self.shape) and not (made.row_dims and self.row)
                and len(self.operands(made.node)) <= MOST_OPERANDS)


class Clustering:
    """The clusters of a graph: `clusters`, and by node `of`."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.before = ordered(facts)
        self.clusters: list[Cluster] = []
        self.of: dict[Node, Cluster] = {}
        self.reach: dict[Node, int] = {}  # of nodes outside of clusters
        self.seen = seen_outside(facts)
        for n in facts.nodes:
            made = member(n, facts)
            if made is None:
                self.reach[n] = self._needed(self._sources(n))
            else:
                self._place(made)

    def _sources(self, n: Node) -> list[Node]:
        return [*n.all_input_nodes, *self.before[n]]

    def _outside(self, n: Node, *clusters: Cluster | None) -> list[Node]:
        """What it needs of what is not in these clusters."""
        return [a for a in self._sources(n) if a not in self.of or self.of[a] not in clusters]

    def _needed(self, nodes: list[Node]) -> int:
        """The given nodes and all that they need."""
        found = 0
        for n in nodes:
            c = self.of.get(n)
            found |= 1 << self.facts.position[n] | self.reach[n] if c is None else c.mask | c.reach
        return found

    def _place(self, made: Member) -> None:
        n, home = made.node, None
        for c in self._candidates(made):
            if self._needed(self._outside(n, c, home)) & c.mask:
                continue  # a path leads out of the cluster and back
            if home is None:
                home = c
            elif _can_merge(home, c, n):
                self._merge(home, c)
        if home is None:
            home = Cluster(made, self.facts)
            self.clusters.append(home)
        home.members.append(made)
        home.mask |= 1 << self.facts.position[n]
        home.reach |= self._needed(self._outside(n, home))
        self.of[n] = home
        self._spread(home)

    def _candidates(self, made: Member) -> list[Cluster]:
        """The clusters that could take it, the latest first."""
        operands = [a for a in made.node.all_input_nodes if a in self.of]
        apart = {self.of[a] for a in operands if a in self.seen}
        found = {self.of[a] for a in operands} - apart
        return sorted((c for c in found if c.takes(made, self.facts)), key=lambda c: c.mask, reverse=True)

    def _merge(self, home: Cluster, other: Cluster) -> None:
        home.members = sorted([*home.members, *other.members], key=lambda m: self.facts.position[m.node])
        home.mask |= other.mask
        home.reach |= other.reach
        self.of.update(dict.fromkeys(other.nodes, home))
        self.clusters.remove(other)

    def _spread(self, home: Cluster) -> None:
        """Whoever needs a part of the cluster needs all of it."""
        everything = home.mask | home.reach
        first, last = (home.mask & -home.mask).bit_length() - 1, home.mask.bit_length()
        for n in self.facts.nodes[first:last]:
            if n in self.reach and self.reach[n] & home.mask:
                self.reach[n] |= everything
        for c in self.clusters:
            if c is not home and c.reach & home.mask:
                c.reach |= everything


def homes(edits: Edits, is_wanted: Callable[[Node], bool]) -> dict[Node, Cluster]:
    """The cluster of each node that is in one; none of a graph that has no call for which they are wanted."""
    return Clustering(edits.facts).of if any(map(is_wanted, edits.nodes())) else {}


def _can_merge(a: Cluster, b: Cluster, n: Node) -> bool:
    return (not (a.reach & b.mask or b.reach & a.mask) and not (a.row and b.row)
            and len({*a.operands(n), *b.operands(n)}) <= MOST_OPERANDS)


def seen_outside(facts: Facts) -> set[Node]:
    """Values whose gradient can be looked at from outside: a part of a kernel's uses of them would be missing
    there. Results of the graph, and what a call that is not known gets (which may hook it)."""
    found: set[Node] = set()
    for n in facts.nodes:
        if n.op == "output" or facts.effects[n].barrier:
            found.update(a for a in n.all_input_nodes if is_tensor(a) and value(a).requires_grad)
    return found
