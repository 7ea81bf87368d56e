# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A tree of drafts that one target pass verifies (DDTree, arXiv 2604.12989).

The drafter gives each slot its own distribution. The tree holds the continuations whose product of slot probabilities is
highest: the likely drafts, and second choices where the drafter hesitates. Each node sees its ancestors alone, so the
target's choice at a node is what it would choose behind that path; following its choices from the anchor down until no
child agrees is lossless, greedy or drawn.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import heapq

import torch

from .target_cache import round_up, upload


class DraftTree:
    """
    Args:
        log_probabilities (`list[list[float]]`): for each slot 1 .. D, those of its most likely tokens, falling.
        token_ids (`list[list[int]]`): the tokens.
        budget (`int`): nodes, the anchor not counted.

    Attributes:
        tokens (`list[int]`): of node i at place i - 1; node 0 is the anchor. Parents come before children.
        parents (`list[int]`), depths (`list[int]`): of nodes 0, 1, ...
    """

    def __init__(self, log_probabilities: list[list[float]], token_ids: list[list[int]], budget: int):
        self.tokens: list[int] = []
        self.parents, self.depths = [-1], [0]
        self.children: list[dict[int, int]] = [{}]
        # Best first: (minus log probability, parent, rank among the tokens of its slot). A node's next sibling and its first
        # child are the only ones that can follow it.
        heap = [(-log_probabilities[0][0], 0, 0, 0.0)] if log_probabilities else []
        while heap and len(self.tokens) < budget:
            cost, parent, rank, parent_cost = heapq.heappop(heap)
            slot = self.depths[parent]
            node = len(self.parents)
            token = token_ids[slot][rank]
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(slot + 1)
            self.children.append({})
            self.children[parent][token] = node
            if rank + 1 < len(token_ids[slot]):
                heapq.heappush(heap, (parent_cost - log_probabilities[slot][rank + 1], parent, rank + 1, parent_cost))
            if slot + 1 < len(token_ids):
                heapq.heappush(heap, (cost - log_probabilities[slot + 1][0], node, 0, cost))

    def path(self, node: int) -> list[int]:
        """Nodes from the anchor to this one."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def follow(self, chosen: list[int]) -> list[int]:
        """
        Args:
            chosen (`list[int]`): the target's token at each node.

        Returns:
            `list[int]`: the nodes that are accepted, the anchor first. The target's token at the last one is the bonus.
        """
        node, path = 0, [0]
        while chosen[node] in self.children[node]:
            node = self.children[node][chosen[node]]
            path.append(node)
        return path

    def attention_mask(self, num_cached: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The additive mask, `[1, 1, nodes, cached + nodes]`, in which a node sees everything before the anchor and its path."""
        nodes = len(self.parents)
        rows = []
        for node, parent in enumerate(self.parents):
            rows.append([False] * nodes if node == 0 else rows[parent].copy())
            rows[node][node] = True
        mask = torch.zeros(1, 1, nodes, round_up(num_cached + nodes), dtype=dtype)
        mask[..., num_cached : num_cached + nodes].masked_fill_(~torch.tensor(rows), torch.finfo(dtype).min)
        return upload(mask, device)[..., : num_cached + nodes]
