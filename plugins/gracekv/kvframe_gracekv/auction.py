"""The paper's greedy: first the floor, then one heap over every Add and Split of all trees."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe_gracekv.trees import Trees

UNREACHED, FRONTIER, SPLIT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Auction:
    """Trees, and the gains of their actions as Python lists: a heap touches single numbers.

    Attributes:
        add: gain of opening a tree (roots; else 0); costs one entry.
        split: gain of splitting a node.
        cost: entries that a split adds; 0 for single tokens.
    """

    add: list[float]
    split: list[float]
    cost: list[int]
    parent: list[int]
    child: list[int]
    unit: list[int]
    state: list[int]

    @classmethod
    def of(cls, trees: Trees, mass: Tensor, worth: Tensor) -> Auction:
        """`mass [K]` what is lost if a node is dropped, `worth [K]` omega times its value. Gains below 0 count as 0."""
        root = trees.parent < 0
        add = torch.where(root, worth * (mass - trees.distortion), 0).clamp_min(0)
        split = (worth * trees.gain).clamp_min(0)
        return cls(
            add=add.tolist(),
            split=split.tolist(),
            cost=trees.cost.tolist(),
            parent=trees.parent.tolist(),
            child=trees.child.tolist(),
            unit=trees.unit.tolist(),
            state=[UNREACHED] * len(trees),
        )

    def open(self, node: int) -> None:
        """Put a root into the frontier."""
        self.state[node] = FRONTIER

    def divide(self, node: int) -> range:
        """Replace a frontier node by its children; return them."""
        self.state[node] = SPLIT
        children = range(self.child[node], self.child[node] + self.cost[node] + 1)
        for child in children:
            self.state[child] = FRONTIER
        return children

    def realise(self, leaves: list[int], budget: int, head_cap: float) -> int:
        """Isolate the leaves in turn where the whole path to them fits into the budget (entries) and the head's cap;
        return the entries spent."""
        spent = 0
        by_unit: dict[int, int] = {}
        for leaf in leaves:
            path, node = [], leaf
            while node >= 0 and self.state[node] == UNREACHED:
                path.append(node)
                node = self.parent[node]
            price = (node < 0) + sum(self.cost[n] for n in path[1:]) + (self.cost[node] if node >= 0 and path else 0)
            unit = self.unit[leaf]
            if spent + price > budget or by_unit.get(unit, 0) + price > head_cap:
                continue
            spent += price
            by_unit[unit] = by_unit.get(unit, 0) + price
            if not path:
                continue
            if node < 0:
                self.open(path[-1])
            else:
                self.divide(node)
            for inner in reversed(path[1:]):
                self.divide(inner)
        return spent

    def run(self, budget: int) -> int:
        """Buy the action of highest gain per entry again and again, skipping what does not fit; return the entries
        spent. Ties go to the earlier node."""
        heap = []
        for node, state in enumerate(self.state):
            if state == UNREACHED and self.parent[node] < 0:
                heap.append((-self.add[node], node, 1))
            elif state == FRONTIER and self.cost[node]:
                heap.append((-self.split[node] / self.cost[node], node, 0))
        heapq.heapify(heap)
        left = budget
        while heap and left > 0:
            _, node, adds = heapq.heappop(heap)
            # Gains never change and each action is pushed once, so nothing in the heap is ever stale.
            if adds:
                left -= 1
                self.open(node)
                exposed: list[int] | range = [node]
            elif self.cost[node] <= left:
                left -= self.cost[node]
                exposed = self.divide(node)
            else:
                continue
            for child in exposed:
                if self.cost[child]:
                    heapq.heappush(heap, (-self.split[child] / self.cost[child], child, 0))
        return budget - left
