"""Why a sequence ends, well or at a client's wish; the numbers are those of glm.v1."""

import enum


class FinishReason(enum.IntEnum):
    """Why a sequence ended well."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


class AbortReason(enum.IntEnum):
    """Why a client ends a sequence."""

    CANCELLED = 1
    STOP_STRING = 2
    SLOW_READER = 3
