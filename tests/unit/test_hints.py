"""Suggestions for an unknown word."""

from __future__ import annotations

from tritium.hints import did_you_mean, nearest, question, suggest


def test_the_nearest_word() -> None:
    assert nearest("rank", ["gpus", "ranks", "rank_0"]) == "ranks"
    assert nearest("x", iter(["gpus", "ranks"])) is None
    assert nearest("x", ()) is None


def test_questions() -> None:
    assert question() == ""
    assert question("a", "b") == " Did you mean 'a' or 'b'?"
    assert did_you_mean("padd", ["pad", "drop"]) == " Did you mean 'pad'?"
    assert did_you_mean("x", ["pad", "drop"]) == ""


def test_a_suggestion_lists_what_there_is() -> None:
    assert suggest("B", iter(["b", "c"])) == " Did you mean 'b'? There is: b, c."
    assert suggest("zzz", ["a"]) == " There is: a."
    known = [f"f{number}" for number in range(25)]
    assert suggest("zzz", known) == f" There is: {', '.join(known[:20])} and 5 more."
    assert suggest("f46", known).startswith(" Did you mean 'f")
