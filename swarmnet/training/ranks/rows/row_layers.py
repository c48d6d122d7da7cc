"""The passes of one rank where ranks are in rows. Those of a row have the same samples and
positions, and cut matrices among them. Those of a column have the same parts of matrices, and share
sequences, or experts and samples.

Both ways are those of ranks that do one of the two alone, each with a group of its own: what a row
has to say to itself lies within the layers, and what rows have to say to each other around them, in
attention, or between tokens and experts.
"""

from __future__ import annotations

from swarmnet.training.ranks.context_parallel_layers import ContextParallelLayers
from swarmnet.training.ranks.expert_layers import ExpertLayers
from swarmnet.training.ranks.local_group import Groups
from swarmnet.training.ranks.parallel_layers import ParallelLayers
from swarmnet.training.ranks.tensor_parallel import Region


class Rows(Region):
    """All ranks, of which those of other rows have another part of most gradients."""

    def __init__(self, groups: Groups, rank: int, num_ranks: int, row_size: int) -> None:
        super().__init__(groups.whole, rank, num_ranks, sequence_parallel=True)
        row, column = divmod(rank, row_size)
        self._row = Region(groups.row, column, row_size)
        self._column = Region(groups.column, row, num_ranks // row_size, sequence_parallel=True)

    @property
    def row(self) -> Region:
        return self._row

    @property
    def column(self) -> Region:
        return self._column


class CutSequences(ParallelLayers, ContextParallelLayers):
    """Rows have a part of each sequence, and of each text."""


class CutExperts(ParallelLayers, ExpertLayers):
    """Rows have some experts of each layer, and some samples."""
