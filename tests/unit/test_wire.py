"""Messages and status records: what goes in comes out, and garbage is a WireError."""

from __future__ import annotations

import marshal
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepool.core import wire

FIELDS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=10,
)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
STATUSES = (
    st.builds(wire.Started, NUMBERS, NUMBERS)
    | st.builds(wire.Exited, NUMBERS)
    | st.builds(wire.Failed, NUMBERS)
)


@settings(max_examples=40)
@given(st.text(min_size=1), st.lists(FIELDS, max_size=6))
def test_a_message_comes_out_as_it_went_in(word: str, fields: list[object]) -> None:
    """Word and fields, of all types that messages use."""
    assert wire.decode(wire.encode(word, *fields)) == (word, *fields)


WHOLE = [
    wire.encode("launch", 1, "worker", 5.0, (1, 2)),
    wire.encode("log", 20, "text" * 20),
    wire.encode("lost", 3, [4, 5]),
]


# Bytes that are made up name lengths of gigabytes, for which memory is asked for first.
@given(
    st.one_of(
        st.binary(max_size=4),
        st.builds(
            lambda one, end, other, start: one[:end] + other[start:],
            st.sampled_from(WHOLE),
            st.integers(0, 60),
            st.sampled_from(WHOLE),
            st.integers(0, 60),
        ),
    )
)
def test_garbage_is_no_message(data: bytes) -> None:
    """Stray bytes, or pieces of two messages: a message or a WireError, nothing else."""
    with suppress(wire.WireError):
        message = wire.decode(data)
        assert isinstance(message[0], str)


@pytest.mark.parametrize("value", [(), (1,), ["word"], "word", None, {"word": 1}])
def test_what_is_no_tuple_with_a_word_is_no_message(value: Any) -> None:
    """Well-formed bytes that say something else are refused as well."""
    with pytest.raises(wire.WireError, match="begins with a word"):
        wire.decode(marshal.dumps(value))


@given(st.integers(0, 40))
def test_a_message_that_was_cut_is_none(length: int) -> None:
    """A packet that was truncated is never taken for a shorter message."""
    data = wire.encode("launch", 1, "a name that is long enough to be cut", 5.0)
    with pytest.raises(wire.WireError):
        wire.decode(data[:length])


def test_a_message_too_long_for_a_packet_is_refused_by_the_sender() -> None:
    """With both sizes in the error; the longest possible one passes."""
    room = wire.MAX_MESSAGE - len(wire.encode("log", b""))
    assert len(wire.encode("log", b"x" * room)) == wire.MAX_MESSAGE
    with pytest.raises(wire.WireError, match=f"{wire.MAX_MESSAGE + 1} bytes"):
        wire.encode("log", b"x" * (room + 1))


@given(STATUSES)
def test_a_status_comes_out_as_it_went_in(status: wire.Status) -> None:
    """All three kinds, with any numbers, in records of one size."""
    data = wire.encode_status(status)
    assert len(data) == wire.STATUS_SIZE
    assert wire.decode_status(data) == status


@given(st.binary(max_size=40))
def test_garbage_is_no_status(data: bytes) -> None:
    """Wrong sizes and unknown words are WireErrors; an exit code is never made up."""
    if len(data) == wire.STATUS_SIZE and data[:4] in (b"STRT", b"EXIT", b"FAIL"):
        return
    with pytest.raises(wire.WireError):
        wire.decode_status(data)


def test_an_unknown_status_word_is_named() -> None:
    """A record of the right size with a word of another version."""
    data = b"LOST" + wire.encode_status(wire.Exited(0))[4:]
    with pytest.raises(wire.WireError, match="LOST"):
        wire.decode_status(data)
