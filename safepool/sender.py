"""Makes frames of units, for one worker.

A worker gets the function of a job once, before its first chunk or group, and is told
when it is needed no longer, with the next thing that it gets.

Called by: the crew, in the engine's thread.
"""

from __future__ import annotations

from safepool.channel import Channel, Part
from safepool.core import frames
from safepool.groups import CallGroup, Group, ItemGroup
from safepool.jobs import Chunk, Job


def forgotten(channel: Channel) -> list[Part]:
    """What the worker needs no longer."""
    parts: list[Part] = [frames.header(frames.FORGET, 0, number, 0, 0) for number in channel.stale]
    channel.stale.clear()
    return parts


def function(channel: Channel, job: Job) -> list[Part]:
    """The function of a job, if the worker does not have it yet."""
    if job.kind == frames.CALL or job.number in channel.functions:
        return []
    channel.functions.add(job.number)
    kind = frames.FUNCTION | (frames.AGAIN if job.by_value else 0)
    return [frames.header(kind, 0, job.number, 0, len(job.body)), job.body]


def chunk(unit: Chunk, job: Job) -> list[Part]:
    """A call, or a chunk of a map."""
    kind = job.kind | unit.again | (frames.SPLITS if unit.may_split else 0)
    first, end = unit.base + unit.done, unit.base + unit.size
    size = len(unit.body)
    parts: list[Part]
    if unit.segment is None:
        parts = [frames.header(kind, unit.number, unit.job, first, size, end), unit.body]
    else:
        kind |= frames.PARCEL
        head = frames.header(kind, unit.number, unit.job, first, size, end)
        parts = [(head, unit.segment), unit.body]
    if job.options.soft_timeout is not None:
        seconds = frames.seconds(job.options.soft_timeout)
        parts[:0] = [frames.header(frames.SOFT, unit.number, 0, 0, len(seconds)), seconds]
    return parts


def group(unit: Group) -> list[Part]:
    """A group that was prepared. Raises what pickling raises."""
    kind = frames.SPLITS
    if isinstance(unit, CallGroup):
        kind |= frames.CALLS
    else:
        kind |= frames.GROUP
        if isinstance(unit, ItemGroup) and unit.sealed:
            kind |= frames.SEALED
    body = unit.body()
    return [frames.header(kind, unit.number, unit.job, 0, len(body), unit.size), body]
