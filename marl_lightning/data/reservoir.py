"""Reservoirs: uniform samples of everything that was ever seen, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Reservoir:
    """A uniform sample, one for each agent, of all items that were ever added for it (Vitter 1985, algorithm R).

    The first ``capacity`` items stay. After that, item ``n`` comes in with probability ``capacity / n`` and takes the
    place of any other, so that each item seen so far is held with the same probability.

    Items are several tensors; they are kept on the CPU, which is used for memory only as far as it is filled.

    Args:
        capacity: items that are held for each agent.
        num_agents: number of agents, ``A``.
        seed: of what is kept and of the draws.

    Attributes:
        seen: ``[A]`` int64, items that were added for each agent so far.
    """

    def __init__(self, *, capacity: int, num_agents: int, seed: int) -> None:
        self.capacity = capacity
        self.seen = torch.zeros(num_agents, dtype=torch.int64)
        self._generator = torch.Generator().manual_seed(seed)
        self._leaves: dict[str, Tensor] = {}  # by name [A, capacity, ...]; made with the first items

    @property
    def size(self) -> Tensor:
        """``[A]`` int64, items that are held for each agent."""
        return self.seen.clamp(max=self.capacity)

    def add(self, items: Mapping[str, Tensor], chosen: Tensor) -> None:
        """Offers items, in the order of their rows.

        Args:
            items: by name ``[M, A, ...]``, on the CPU; the same names and shapes in every call.
            chosen: ``[M, A]`` bool, those that are offered; nothing else counts.
        """
        before = self.seen + chosen.cumsum(0) - chosen.long()
        if not self._leaves:
            self._allocate(items)
        # In double precision, since float32 has no odd numbers beyond 2^24.
        draw = torch.rand(chosen.shape, dtype=torch.float64, generator=self._generator)
        slots = torch.where(before < self.capacity, before, (draw * (before + 1)).long())
        rows, agents = (chosen & (slots < self.capacity)).nonzero(as_tuple=True)
        places = agents * self.capacity + slots[rows, agents]
        # Of items for the same place the last one stays: the first one of the reverse order.
        _, last = np.unique(places.flip(0).numpy(), return_index=True)
        last = len(places) - 1 - torch.from_numpy(last)
        for name, leaf in self._leaves.items():
            leaf.flatten(0, 1).index_copy_(0, places[last], items[name][rows[last], agents[last]])
        self.seen += chosen.sum(0)

    def sample(self, count: int) -> dict[str, Tensor]:
        """Returns by name ``[count, A, ...]``, drawn for each agent from what is held, with replacement.

        An agent of which nothing is held gets zeros. Items must have been added, for whichever agent.
        """
        draw = torch.rand(count, len(self.seen), dtype=torch.float64, generator=self._generator)
        places = torch.arange(len(self.seen)) * self.capacity + (draw * self.size).long()
        return {
            name: leaf.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)
            for name, leaf in self._leaves.items()
        }

    def _allocate(self, items: Mapping[str, Tensor]) -> None:
        shape = (len(self.seen), self.capacity)
        self._leaves = {name: torch.zeros(*shape, *item.shape[2:], dtype=item.dtype) for name, item in items.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that :meth:`load_state_dict` needs, the items themselves included."""
        filled = int(self.size.max())
        return {
            "seen": self.seen.clone(),
            "generator": self._generator.get_state(),
            "items": {name: leaf[:, :filled].clone() for name, leaf in self._leaves.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: if it is of another number of agents, or of a reservoir of another capacity.
        """
        seen, items = state["seen"], state["items"]
        if len(seen) != len(self.seen):
            raise ValueError(f"the saved reservoir is of {len(seen)} agents, this one of {len(self.seen)}")
        filled = max((item.shape[1] for item in items.values()), default=0)
        if filled != min(int(seen.max()), self.capacity):
            raise ValueError(
                f"the saved reservoir has another capacity than this one of {self.capacity}: resume with the same one"
            )
        self.seen = seen.clone()
        self._generator.set_state(state["generator"])
        self._allocate(items)
        for name, item in items.items():
            self._leaves[name][:, :filled] = item
