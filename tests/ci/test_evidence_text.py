"""Hostile text: what evidence says is shown as text, wherever it is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.evidence.form import EvidenceError
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.text import annotation, annotation_property, markdown, plain

Made = Any

HOSTILE = [
    "\x1b[2K\x1b[1Aall passed", "\x9b31m", "a\rb", "a\nb", "a\x00b", "a\x08\x08b", "\x07", "a\u2028b", "a\x85b",
    "\u202egnp.exe", "\u2066a\u2069", "\u200bx", "x\ufeff", "a\u00adb", "\U000e0041", "\u3164", "\u2800", "\ufe0f",
    "\ud800", "\u034f", "\ue000", "\u00a0", "\u3000",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_cannot_be_seen_is_shown(text: str) -> None:
    """No control, no change of direction, nothing without width comes through: each is an escape in ASCII."""
    shown = plain(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert "\\" in shown


@pytest.mark.parametrize("text", ["größer ≥ 1", "旋转", "x → y", "100 %", "a\\b", "[bold]"])
def test_what_can_be_seen_is_left_as_it_is(text: str) -> None:
    """Words of any language are words."""
    assert plain(text) == text


def test_length_is_bounded() -> None:
    """A megabyte is shown as its beginning."""
    assert len(plain("x" * 10**6)) == 300
    assert plain("x" * 10**6, limit=10) == "x" * 9 + "…"
    assert len(markdown("`" * 10**6)) < 300 * 8


@pytest.mark.parametrize("text", ["::error::no", "a\n::set-output name=x::y", "##[error]no", ":::error", "::::"])
def test_a_log_obeys_nothing(text: str) -> None:
    """Workflow commands begin with two colons, or with two number signs before a bracket."""
    for shown in (plain(text), annotation(text), annotation_property(text), markdown(text)):
        assert "::" not in shown
        assert "##[" not in shown
        assert "\n" not in shown


def test_an_annotation_says_what_was_meant() -> None:
    """A per cent sign would begin an escape; in a property so do a colon and a comma separate."""
    assert annotation("100%0Aok: a, b") == "100%250Aok: a, b"
    assert annotation_property("a:b,c%") == "a%3Ab%2Cc%25"


@pytest.mark.parametrize(
    "text",
    ["a|b", "`x`", "<img src=x onerror=alert(1)>", "<!-- x", "&lt;", "[a](http://b)", "![a](b)", "**a**", "_a_",
     "~~a~~", "# a", "- a", "+ a", "1) a", "1. a", "    a", "> a", "a\n\n# b", "@everyone", "owner/name#12", "http://b",
     "www.b.com", "$a$", ":tada:", "\\|", "---", "==="],
)  # fmt: skip
def test_markdown_is_text(text: str) -> None:
    """No character that Markdown or HTML gives a meaning stands as itself, and a mention is broken up."""
    shown = markdown(text)
    assert not re.search(r"@\w|&#(?:64|35);(?!<!-- -->)", shown)
    shown = shown.replace("<!-- -->", "")
    for character in "|`<>[]()*~!@$:\\":
        assert character not in shown
    assert not re.match(r"[#+=_ -]|\d+\.", shown)
    assert "&lt;" not in shown
    assert "www." not in shown


def test_words_stay_readable_in_markdown() -> None:
    """Names of candidates and cases are not torn apart."""
    assert markdown("ropecheck/triton-pair x accuracy-forward, b2_s7") == (
        "ropecheck/triton-pair x accuracy-forward, b2_s7"
    )


def test_a_hostile_reason_is_shown_harmless(made: Made, command: Any) -> None:
    """A candidate's own words reach the table and JSON without an escape sequence or a style of the terminal."""
    reason = "\x1b[31mred\x1b[0m [bold]loud[/bold] \u202eleft ::error::x <b>"
    folder = made.written("report", [made.verdict(verdict="fail", reason=reason)], exit_status=1)
    status, out, _ = command("evidence", "show", str(folder))
    assert status == 0
    together = "".join(out.split())
    assert "\\x1b[31mred" in together
    assert "[bold]loud[/bold]" in together
    for bad in ("\x1b", "\u202e", "::error"):
        assert bad not in out
    status, out, _ = command("evidence", "show", "--json", str(folder))
    assert json.loads(out)[0]["runs"][0]["cells"][0]["reasons"] == [reason]
    assert out.isascii()


def test_a_hostile_name_of_a_file_is_shown_harmless(made: Made, tmp_path: Path) -> None:
    """The sentence that refuses a file does not obey its name."""
    folder = made.written("report", [made.verdict()])
    (folder / "\x1b[2Kok\n::error::x").write_text("")
    with pytest.raises(EvidenceError, match=r"is not in manifest\.json") as refused:
        load(folder)
    assert str(refused.value).isprintable()
    assert "::" not in str(refused.value)
