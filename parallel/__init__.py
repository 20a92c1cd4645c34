"""Meshes, placements, collectives, and the proof that sharding changes nothing."""

from ._collectives import CollectiveError as CollectiveError
from ._collectives import Handle as Handle
from ._collectives import all_gather as all_gather
from ._collectives import all_gather_start as all_gather_start
from ._collectives import all_reduce as all_reduce
from ._collectives import all_to_all as all_to_all
from ._collectives import axis_index as axis_index
from ._collectives import axis_size as axis_size
from ._collectives import broadcast_from as broadcast_from
from ._collectives import chunk_sizes as chunk_sizes
from ._collectives import reduce_replicated as reduce_replicated
from ._collectives import reduce_scatter as reduce_scatter
from ._collectives import reduce_scatter_start as reduce_scatter_start
from ._collectives import reduce_to as reduce_to
from ._collectives import replicate as replicate
from ._pool import Pool as Pool
from ._pool import WorkerError as WorkerError
from ._pool import shared_pool as shared_pool
from ._pool import spawn as spawn
