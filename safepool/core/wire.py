"""The words that owner, sidecar and launchers say to each other: bytes in, values out.

Two forms, both pure:

* *messages* between the three, one per packet of a SEQPACKET or DGRAM socket pair:
  a tuple whose first item is the word. Marshalled, since both ends are one
  interpreter version and the sidecar should import next to nothing. Descriptors
  travel beside a message, never inside.
* *status records* of one worker, of fixed size, through a pipe of its own:
  STARTED (pid, start) or FAILED (errno), then EXITED (exit code). End of file
  without EXITED means that the launcher itself is gone.

========== ========================================== =======================
word        fields                                     direction
========== ========================================== =======================
hello       run, mark, owner pid, owner start, folder,  owner -> sidecar
            grace, start of the run (ticks), path and
            inode of its cgroup (empty, 0: none)
launch      launcher, method, policy                    owner -> sidecar
attach      launcher, pid, start, policy                owner -> sidecar
lost        launcher, worker numbers                    owner -> sidecar
retire      (none)                                      owner -> sidecar
yield       (none)                                      owner -> sidecar
armed       pid, start, what the registry refused       sidecar -> owner
launched    launcher, pid (0: failed), start or errno   sidecar -> owner
swept       launcher                                    sidecar -> owner
log         level, text                                 sidecar -> owner
start       worker number, name, which stdio, is there  owner -> launcher
            a blob, is there a tracker, how many more
retiring    worker number                               owner -> launcher
end         worker number, grace                        owner -> launcher
flush       number of a signal that is pending          owner -> launcher
told        launcher, level, text                       launcher -> sidecar
retired     launcher                                    launcher -> both
========== ========================================== =======================
"""

from __future__ import annotations

import marshal
import struct
from typing import Any

from safepool.core.values import dataclass

MAX_MESSAGE = 65536
"""Bytes of one message; larger matters travel in a descriptor."""

MAX_DESCRIPTORS = 250
"""Descriptors beside one message; the kernel's bound is 253 (SCM_MAX_FD)."""


CONTROL, OWNER, REPORTS, REPORTERS = 3, 4, 5, 6
"""Descriptors that a sidecar is born with: its end of the control socket, what is readable
once the owner is gone (a pidfd of it, or a pipe), and both ends of the datagram pair on which
launchers tell what they ended."""


class WireError(ValueError):
    """What came is no message: the other side is not a safepool of this version."""


def encode(*message: Any) -> bytes:
    """Pack a message; raises WireError when it is too long for one packet."""
    data = marshal.dumps(message)
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE} fit a packet")
    return data


def decode(data: bytes) -> tuple[Any, ...]:
    """Unpack a message; raises WireError when it is none."""
    try:
        message = marshal.loads(data)
    except (ValueError, EOFError, TypeError) as error:
        raise WireError(f"unreadable message: {error}") from None
    if not isinstance(message, tuple) or not message or not isinstance(message[0], str):
        raise WireError("a message must be a tuple that begins with a word")
    return message


_STATUS = struct.Struct("=4sqq")
STATUS_SIZE = _STATUS.size


@dataclass(frozen=True)
class Started:
    """The worker exists."""

    pid: int
    start: int


@dataclass(frozen=True)
class Exited:
    """The worker and its tree are gone; the code is as in Process.exitcode."""

    code: int


@dataclass(frozen=True)
class Failed:
    """The worker could not be started; ``number`` is the errno."""

    number: int


Status = Started | Exited | Failed


def encode_status(status: Status) -> bytes:
    """Pack one status record."""
    if isinstance(status, Started):
        return _STATUS.pack(b"STRT", status.pid, status.start)
    if isinstance(status, Exited):
        return _STATUS.pack(b"EXIT", status.code, 0)
    return _STATUS.pack(b"FAIL", status.number, 0)


def decode_status(data: bytes) -> Status:
    """Unpack one status record; raises WireError when it is none."""
    try:
        word, first, second = _STATUS.unpack(data)
    except struct.error as error:
        raise WireError(f"unreadable status record: {error}") from None
    if word == b"STRT":
        return Started(first, second)
    if word == b"EXIT":
        return Exited(first)
    if word == b"FAIL":
        return Failed(first)
    raise WireError(f"unknown status record {word!r}")
