"""A service that a launcher started ends with it, however the launcher ended.

The launcher names itself in `GLM_MESH_PARENT_PID`; started by anybody else nothing happens. The
kernel sends SIGTERM, so the service drains as after any other stop.
"""

import ctypes
import os
import signal
import sys
from typing import Final

PARENT_VARIABLE: Final = "GLM_MESH_PARENT_PID"
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM at the launcher's death; called first in `__main__`."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdecimal() or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    # It may have died before the line above, or this is a grandchild: only a parent counts.
    if os.getppid() != int(parent) and not is_alive(int(parent)):
        os.kill(os.getpid(), signal.SIGTERM)


def is_alive(pid: int) -> bool:
    """Whether there is a process of that number, anybody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
