"""A forward pass that stops now and then to say how far it is, so that what is written can leave early."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

OnLayers: TypeAlias = Callable[[int, int], None]  # of layers [first, stop)


class LayerGroups(NamedTuple):
    """Who is told, and how often in a pass, that the keys and values of further layers are in their pages.

    On a GPU that is so for whatever follows on the current stream.
    """

    num_groups: int  # as equal as can be; one a layer at most
    on_layers: OnLayers

    def ranges(self, num_layers: int) -> list[tuple[int, int]]:
        num_groups = min(self.num_groups, num_layers)
        bounds = [index * num_layers // num_groups for index in range(num_groups + 1)]
        return list(pairwise(bounds))
