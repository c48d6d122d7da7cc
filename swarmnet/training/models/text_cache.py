"""What layers of `transformers` keep of a text's earlier tokens: keys and values, states of linear
attention, or both.

A cache is the family's own. Families ask it how long the text is, by their first layer with
attention; but a stage calls one layer after the other, each within a pass of its own, and may have
none with attention. So each layer gets a view of the cache, which answers for that layer.
"""

from __future__ import annotations

import copy
import functools
from typing import Any


class TextCache:
    """Of one text, for the layers of a stage."""

    def __init__(self, cache: Any) -> None:
        """`cache`: an empty one of the family, for the whole model."""
        self._cache = cache
        self._views: dict[int, Any] = {}

    def of_layer(self, index: int) -> Any:
        """As a family's layer takes it. `index`: in the whole model."""
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = copy.copy(self._cache)  # layers' states are shared
            kind: Any = type(self._cache)
            view.__class__ = _view_class(kind)
            view.seen_index, view.seen_tokens = index, 0
        return view

    def extend(self, index: int, num_tokens: int) -> None:
        """The layer has these tokens too."""
        self.of_layer(index).seen_tokens += num_tokens


@functools.lru_cache(maxsize=16)
def _view_class(cache_class: Any) -> type:
    """Some families insist on a cache of their own class."""
    from transformers.cache_utils import CacheLayerMixin

    class View(cache_class):
        """Earlier layers have the present tokens already, so lengths are those of the layer."""

        seen_index: int
        seen_tokens: int

        def get_seq_length(self, layer_idx: int = 0) -> Any:
            return self.seen_tokens

        def get_query_offset(self, layer_idx: int = 0) -> Any:
            return self.seen_tokens

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> Any:
            layers, index = self.layers, self.seen_index
            if index < len(layers) and isinstance(layers[index], CacheLayerMixin):
                return layers[index].get_mask_sizes(query_length)
            return self.seen_tokens + query_length, 0

        def has_previous_state(
            self, layer_idx: int | None = None, state_idx: int | None = None
        ) -> Any:
            return super().has_previous_state(self.seen_index, state_idx)

    return View
