"""Divided backward of a stage: first the gradients of its input, later those of its parameters.

    end ─▶ N3 ───────▶ N2 ───────▶ N1 ───────▶ input       the way to the input
           └▶ weight 3 └▶ weight 2 └▶ weight 1

The first pass walks the way to the input, and keeps the gradient that arrives at each node of which
a parameter hangs. The second pass begins at these nodes, and computes nothing of the way again: one
call of autograd's engine for each group of parameters that hang of the same nodes.

Where a parameter has a way to an end that the input hasn't, the second pass walks the whole graph.
So it does with checkpointed activations, which each call would compute again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Gradients = Sequence[Tensor | None]


class DividedBackward:
    """Divided backward of one microbatch.

    Args:
        ends: what the stage returned; with graphs.
        gradients: of the ends; None: 1.
        inputs: leaves of the graph.
        parameters: others, whose gradients `weights` accumulates.
        whole: let the second pass walk the whole graph.
    """

    def __init__(
        self,
        ends: Sequence[Tensor],
        gradients: _Gradients,
        inputs: Sequence[Tensor],
        parameters: Iterable[Tensor],
        *,
        whole: bool,
    ) -> None:
        self._ends = ends
        self._gradients = gradients
        self._inputs = inputs
        self._parameters = [p for p in parameters if p.requires_grad]
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}
        groups = None if whole or not ends or not inputs else self._grouped()
        self._groups = groups

    def inputs(self) -> list[Tensor | None]:
        """Return the gradients of the inputs; None where there is no way to an input."""
        if not self._ends or not self._inputs:
            return [None] * len(self._inputs)
        with ExitStack() as hooks:
            for nodes, _ in self._groups or ():
                for node in nodes:
                    keep = partial(self._arrived.__setitem__, node)
                    hooks.callback(node.register_prehook(keep).remove)
            found = torch.autograd.grad(
                self._ends, self._inputs, self._gradients, retain_graph=True, allow_unused=True
            )
        return [*found]

    def weights(self) -> None:
        """Accumulate the parameters' gradients."""
        if self._groups is None:
            if self._ends and self._parameters:
                torch.autograd.backward(self._ends, self._gradients, inputs=self._parameters)
            return
        for nodes, parameters in self._groups:
            edges = {
                GradientEdge(node, n): gradient
                for node in nodes
                for n, gradient in enumerate(self._arrived.get(node, ()))
                if gradient is not None
            }
            with ExitStack() as hooks:
                if len(nodes) > 1:  # what flows from one to the next was in what arrived there
                    for node in nodes:
                        arrived = self._arrived.get(node)
                        replace = node.register_prehook(lambda _, arrived=arrived: arrived)
                        hooks.callback(replace.remove)
                if edges:
                    torch.autograd.backward(
                        [*edges],
                        [*edges.values()],
                        retain_graph=True,
                        inputs=parameters,
                    )

    def _grouped(self) -> list[tuple[list[Node], list[Tensor]]] | None:
        """Return the parameters that hang of the same nodes of the way, and these nodes.

        None: a parameter has a way of its own to an end.
        """
        roots = {get_gradient_edge(end).node for end in self._ends}
        parents = _parents(roots)
        way = _above([get_gradient_edge(x).node for x in self._inputs], parents, set())[0]
        nodes_of: dict[Tensor, set[Node]] = {}
        for p in self._parameters:
            node = get_gradient_edge(p).node
            if node in parents:
                between, nodes_of[p] = _above([node], parents, way)
                if not between.isdisjoint(roots):
                    return None
        groups: list[tuple[set[Node], list[Tensor]]] = []
        for p, nodes in nodes_of.items():
            own = (set(nodes), [p])
            for other in [group for group in groups if not group[0].isdisjoint(nodes)]:
                groups.remove(other)
                own = (own[0] | other[0], other[1] + own[1])
            groups.append(own)
        return [([*nodes], parameters) for nodes, parameters in groups]


def _parents(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes of a graph, with those from which each gets gradients."""
    parents: dict[Node, list[Node]] = defaultdict(list)
    left = [*roots]
    seen = set(left)
    while left:
        node = left.pop()
        parents.setdefault(node, [])
        for child, _ in node.next_functions:
            if child is not None:
                parents[child].append(node)
                if child not in seen:
                    seen.add(child)
                    left.append(child)
    return parents


def _above(
    nodes: Sequence[Node], parents: dict[Node, list[Node]], stop: set[Node]
) -> tuple[set[Node], set[Node]]:
    """Return the nodes above some, themselves included, up to those of `stop`; and the latter."""
    found = set(nodes)
    stopped = set()
    left = [*nodes]
    while left:
        for parent in parents.get(left.pop(), ()):
            if parent in stop:
                stopped.add(parent)
            elif parent not in found:
                found.add(parent)
                left.append(parent)
    return found, stopped
