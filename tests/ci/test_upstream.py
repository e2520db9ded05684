"""What the nightly look at the vendors' newest releases takes for a change."""

from __future__ import annotations

import pytest

from ropecheck.ci import listings
from ropecheck.ci.cli import main


def reports(*states: str) -> list[dict[str, object]]:
    more = {"package": "diffusers", "release": "1.0", "cases": 1, "within": 0, "first_unequal": None, "symbols": []}
    return [{"contract": f"contract-{i}", "state": state, "tables": "known", **more} for i, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "plain", "unchanged"),
    [
        (("known", "known"), 0, 0),
        (("known", "drift"), 0, 1),
        (("known", "missing"), 0, 1),
        (("known", "not-installed"), 0, 1),
        ((), 0, 1),
        (("missing", "unequal"), 4, 4),
    ],
)
def test_whatever_is_not_as_recorded_is_a_change(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...], plain: int, unchanged: int
) -> None:
    """A function that was moved, rewritten or is not there is red at night, though no byte differs."""
    monkeypatch.setattr(listings, "checked_pins", lambda names: reports(*states))
    assert main(["contracts", "--check", "--json"]) == plain
    assert main(["contracts", "--json", "--unchanged"]) == unchanged
