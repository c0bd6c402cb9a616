"""The processes of a run: how they start, find each other, notice a failure, and end.

Owns cluster detection, the rendezvous, a message channel that is independent of JAX's collectives, signals, the watchdog
and the local launcher. Knows nothing of models or files. Open `_cluster.py` first, then the table in `_launchers.py`.
"""

from ._addresses import Member as Member
from ._agreement import (
    RowCheck as RowCheck,
    agree_on_examples as agree_on_examples,
    agree_on_opt_state as agree_on_opt_state,
    agree_on_program as agree_on_program,
    agree_on_trainer as agree_on_trainer,
    agree_on_values as agree_on_values,
)
from ._cluster import WORKER as WORKER, start as start
from ._exits import discard as discard, exit_now as exit_now, say as say
from ._interrupts import Preempted as Preempted, Preemption as Preemption
from ._launch import launch as launch
from ._launchers import find_member as find_member
from ._links import PeerError as PeerError
from ._peers import Peers as Peers
from ._watch import Timeouts as Timeouts, Watch as Watch
