"""Stop strings against the plain definition: the text before the first one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from moonpool_worker.engine.stop_strings import StopStrings

letters = st.text("ab", max_size=12)


def feed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.finish(), False


@given(st.lists(letters, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_shows_what_is_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = feed(pieces, stops)
    whole = "".join(pieces)
    # The stop whose end comes first ends the text; of those that came with one piece, the one that begins first.
    assert whole.startswith(shown)
    assert stopped == any(stop in whole for stop in stops)
    assert not any(stop in shown for stop in stops)
    if stopped:
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)
    else:
        assert shown == whole


def test_holds_back_only_what_could_begin_a_stop() -> None:
    matcher = StopStrings(["\n\n", "END"])
    assert matcher.push("one E") == ("one ", False)
    assert matcher.push("g") == ("Eg", False)
    assert matcher.push("\n") == ("", False)
    assert matcher.push("x") == ("\nx", False)
    assert matcher.push("EN") == ("", False)
    assert matcher.push("D more") == ("", True)
