"""Text from outside, made fit for a terminal, a Markdown page, a log of a workflow.

Names, reasons and logs in evidence are written by candidates, and evidence by whoever made it: any of it may try to
look like something else.
"""

from __future__ import annotations

import re

# Shown as nothing or as a blank, though Unicode calls them letters, marks or symbols.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {chr(c) for c in range(0xFE00, 0xFE10)}
_TAGS = range(0xE0000, 0xE1000)

# A workflow's log obeys lines that begin with two colons, and two number signs before a bracket anywhere.
_COMMANDS = re.compile(r":(?=:)|##(?=\[)")

_MARKUP = re.compile(r"[^\w .,;/+=-]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|^[+= -]|^\d+\.|(?<=www)\.", re.IGNORECASE)


def plain(text: object, *, limit: int = 300) -> str:
    """``text`` on one line, at most ``limit`` characters of it, with what cannot be seen shown as an escape: controls,
    escape sequences, characters that turn the direction of writing or have no width, broken surrogates."""
    given = str(text)
    cut = given[: limit - 1] + "\u2026" if len(given) > limit else given
    shown = "".join(c if _is_seen(c) else c.encode("unicode_escape").decode() for c in cut)
    return _COMMANDS.sub(lambda found: f"{found[0]} ", shown)


def _is_seen(character: str) -> bool:
    return character.isprintable() and character not in _UNSEEN and ord(character) not in _TAGS


def markdown(text: object, *, limit: int = 300) -> str:
    """``text`` as characters of a Markdown page or table: no markup, HTML, link, mention or reference comes of it."""
    return _MARKUP.sub(lambda found: f"{found[0][:-1]}{_entity(found[0][-1])}", plain(text, limit=limit))


def _entity(character: str) -> str:
    # Mentions and references are looked for in the finished page, where an entity is no longer one.
    return f"&#{ord(character)};" + ("<!-- -->" if character in "@#" else "")


def annotation(text: object, *, limit: int = 1000) -> str:
    """``text`` as the message of a workflow command such as ``::error::``."""
    return plain(text, limit=limit).replace("%", "%25")


def annotation_property(text: object, *, limit: int = 300) -> str:
    """``text`` as the value of a workflow command's property, its file or title."""
    return annotation(text, limit=limit).replace(":", "%3A").replace(",", "%2C")
