"""Balanced work: the cost of a sample's forward and backward pass, and dealing costs into equal parts.

Costs are whole numbers, so that sums do not depend on their order.
"""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cost:
    """The cost of a forward pass in multiplications: a part per token and a part per pair of tokens in attention."""

    token: int = 1  # of a token, in all layers
    sampled: int = 0  # of a token in the loss, in the output embedding
    pair: int = 0  # of a token and one that it sees, itself or before it

    def of(self, tokens: int, sampled: int, before: int = 0) -> int:
        """Of `tokens` in a sample, `sampled` of them in the loss, that also see all of `before` tokens in front of them."""
        pairs = tokens * (tokens + 1) // 2 + tokens * before
        return tokens * self.token + sampled * self.sampled + pairs * self.pair


TOKENS = Cost()


def model_cost(model_dir: str | Path) -> Cost:
    """The cost of a model by its config.json, with the experts that a token goes through; that of counting tokens if it says no shape."""
    try:
        config: dict[str, Any] = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        hidden, layers, heads = (int(config[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        dense = int(config["intermediate_size"])
    except (OSError, KeyError, TypeError, ValueError):
        return TOKENS
    size = int(config.get("head_dim") or hidden // heads)
    key_heads = int(config.get("num_key_value_heads") or heads)
    experts = int(config.get("num_experts_per_tok") or 0)
    wide = experts * int(config.get("moe_intermediate_size") or dense) if experts else dense
    block = hidden * size * (2 * heads + 2 * key_heads) + 3 * hidden * wide
    return Cost(layers * block, hidden * int(config.get("vocab_size") or 0), 2 * layers * heads * size)


def balance(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Deal the costs to `parts` lists of nearly equal sums: the places in `costs` that each gets, the largest sum first.

    By largest differencing (Karmarkar-Karp), unless giving the largest first to the least loaded list has a smaller
    spread. The order of `costs` counts only where some are equal.
    """
    order = sorted(range(len(costs)), key=lambda place: -costs[place])
    candidates = [_differenced(costs, order, parts), _longest_first(costs, order, parts)]
    dealt = min(candidates, key=lambda lists: spread(costs, lists))
    return sorted((sorted(own) for own in dealt), key=lambda own: (-sum(costs[i] for i in own), own))


def spread(costs: Sequence[int], dealt: Sequence[Sequence[int]]) -> int:
    sums = [sum(costs[place] for place in own) for own in dealt]
    return max(sums) - min(sums)


# Lists with their sums, the largest first; those that are not there are empty.
_Lists = list[tuple[int, list[int]]]


def _differenced(costs: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    """Join the two partial dealings whose sums differ most, the heavy lists of one with the light ones of the other, until one is left."""
    heap: list[tuple[int, int, _Lists]] = []
    for number, place in enumerate(order):
        heap.append((-costs[place] if parts > 1 else 0, number, [(costs[place], [place])]))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        joined = _joined(heapq.heappop(heap)[2], heapq.heappop(heap)[2], parts)
        least = joined[-1][0] if len(joined) == parts else 0
        heapq.heappush(heap, (least - joined[0][0], number, joined))
        number += 1
    dealt = [own for _, own in heap[0][2]] if heap else []
    return dealt + [[] for _ in range(parts - len(dealt))]


def _joined(first: _Lists, second: _Lists, parts: int) -> _Lists:
    over = max(len(first) + len(second) - parts, 0)
    alone = first[: len(first) - over] + second[: len(second) - over]
    light, heavy = first[len(first) - over :], second[len(second) - over :][::-1]
    together = [(a + b, own + other) for (a, own), (b, other) in zip(light, heavy, strict=True)]
    return sorted(alone + together, key=lambda item: -item[0])


def _longest_first(costs: Sequence[int], order: Sequence[int], parts: int) -> list[list[int]]:
    heap = [(0, part) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for place in order:
        load, part = heapq.heappop(heap)
        dealt[part].append(place)
        heapq.heappush(heap, (load + costs[place], part))
    return dealt
