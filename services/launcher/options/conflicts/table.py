"""All conflicts."""

from typing import Final

from services.launcher.options.conflicts.cache import CACHES
from services.launcher.options.conflicts.experts import EXPERTS
from services.launcher.options.conflicts.fine_grained import FINE_GRAINED
from services.launcher.options.conflicts.graphs import GRAPHS
from services.launcher.options.conflicts.limits import LIMITS
from services.launcher.options.conflicts.parallel import PARALLEL
from services.launcher.options.conflicts.replicas import REPLICAS
from services.launcher.options.conflicts.topology import TOPOLOGY
from services.launcher.options.conflicts.transfer import TRANSFER
from services.launcher.options.conflicts.variables import VARIABLES

CONFLICTS: Final = (
    *PARALLEL,
    *REPLICAS,
    *EXPERTS,
    *FINE_GRAINED,
    *CACHES,
    *LIMITS,
    *GRAPHS,
    *TRANSFER,
    *TOPOLOGY,
    *VARIABLES,
)
