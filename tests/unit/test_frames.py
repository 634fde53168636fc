"""Frames and pages: what goes in comes out, however it is cut, whenever the writer dies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from safepool.core import frames

FRAMES = st.lists(
    st.tuples(
        st.sampled_from([frames.CALL, frames.MAP, frames.VALUE, frames.ERROR]),
        st.integers(0, 2**63),
        st.integers(0, 2**63),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=300),
        st.integers(0, 2**32 - 1),
    ),
    max_size=12,
)


@given(FRAMES, st.lists(st.integers(1, 400), min_size=1))
def test_frames_survive_any_cut(
    sent: list[tuple[int, int, int, int, bytes, int]], cuts: list[int]
) -> None:
    """A stream cut at any places gives the same frames, and what is missing is never too much."""
    stream = b"".join(
        frames.header(kind, number, job, item, len(body), end) + body
        for kind, number, job, item, body, end in sent
    )
    decoder = frames.Decoder()
    got: list[frames.Frame] = []
    at = 0
    for turn in range(len(stream)):
        if at >= len(stream):
            break
        piece = stream[at : at + cuts[turn % len(cuts)]]
        assert decoder.missing > 0
        enough = len(piece) >= decoder.missing
        new = decoder.feed(piece)
        assert enough or not new
        got += new
        at += len(piece)
    assert [tuple(frame) for frame in got] == sent


@given(st.lists(st.binary(max_size=100)))
def test_records_come_back(entries: list[bytes]) -> None:
    """The values of a chunk come back one by one, in order."""
    body = b"".join(frames.record(entry) for entry in entries)
    assert list(frames.records(body)) == [(entry, 1) for entry in entries]


def test_page_shows_committed_values_only() -> None:
    """A worker killed between two values leaves those that it had committed, no half ones."""
    page = memoryview(bytearray(frames.PAGE_BYTES))
    frames.write_page(page, 7, 3)
    assert frames.read_page(page) == (7, 3, b"")
    first = frames.record(b"first")
    page[frames.PAGE_START : frames.PAGE_START + len(first)] = first
    frames.commit_page(page, len(first))
    second = frames.record(b"second")
    end = frames.PAGE_START + len(first) + len(second) - 1
    page[frames.PAGE_START + len(first) : end] = second[:-1]  # dies here
    left = frames.read_page(page)
    assert (left.number, left.item) == (7, 3)
    assert list(frames.records(left.body)) == [(b"first", 1)]


def test_new_page_forgets_the_last_task() -> None:
    """Values of one task are never taken for those of the next."""
    page = memoryview(bytearray(frames.PAGE_BYTES))
    frames.write_page(page, 1, 0)
    page[frames.PAGE_START : frames.PAGE_START + 5] = frames.record(b"x")
    frames.commit_page(page, 5)
    frames.write_page(page, 2, 0)
    assert frames.read_page(page) == (2, 0, b"")
