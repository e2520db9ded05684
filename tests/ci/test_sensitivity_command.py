"""The command ``ropecheck sensitivity``: what it prints, what it writes, its exit status, and the page it fills in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ropecheck.ci import sensitivity
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.faults_page import MARKERS, filled_in, tables
from ropecheck.ci.sources import sensitivity_hash
from ropecheck.suites.faults.asking import SensitivityError
from ropecheck.suites.faults.dictionary import FAULTS
from ropecheck.suites.faults.reports import REPORTS
from ropecheck.suites.faults.sensitivity import Record, Sensitivity
from ropecheck.suites.faults.sighting import Sighting
from ropecheck.suites.judgements import JUDGEMENTS

Command = Callable[..., "tuple[int, str, str]"]
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def record(name: str, kind: str = "mechanical", **more: object) -> Record:
    made = Record(name, kind, f"{name} is wrong", "rotate", "neox", "bfloat16", **more)  # type: ignore[arg-type]
    made.killed_by = {judgement: seen.case for judgement, seen in made.sightings.items()}
    return made


SEEN = record("seen", sightings={"purity": Sighting("p", "random", "contiguous"),
                                 "laws": Sighting("l", "random", "contiguous", ("batch 2",))})  # fmt: skip
ALONE = record("alone", "semantic",
               sightings={"purity": Sighting("q", "special", "x=packed-qkv", ("x view packed-qkv",))})  # fmt: skip
BLOCKED = record("blocked", blocked="needs a CUDA GPU")
NONE = record("none", "semantic", equivalent="both are one test")
SURVIVOR = record("survivor")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``measured(*records)``: what the command will have found."""

    def found(*records: Record) -> None:
        monkeypatch.setattr(sensitivity, "measure", lambda *_, **__: Sensitivity(list(records), seconds=1.0))

    return found


def test_people_are_told_what_matters(command: Command, measured: Callable[..., None]) -> None:
    """Judgements, what one alone sees, what could not be judged, and the coverage; a row for each only on request."""
    measured(SEEN, ALONE, BLOCKED, NONE)
    status, out, _ = command("sensitivity")
    assert status == 0
    assert "2 of 2 faults are seen (100 %); 1 proven to be no faults, 1 not judged" in out
    assert re.search(r"laws +│ 1 +│ 0 +│ sees nothing that no other sees", out)
    assert re.search(r"alone .*purity +│ x view packed-qkv", out)
    assert "not judged on this machine, needs a CUDA GPU: blocked" in out
    assert not re.search(r"│ seen ", out)
    _, out, _ = command("sensitivity", "--all")
    assert re.search(r"│ seen .*purity, laws", out)
    assert "both are one test" in out


def test_what_survives_comes_first(command: Command, measured: Callable[..., None]) -> None:
    """For people and for machines, and the exit status is 1."""
    measured(SEEN, SURVIVOR)
    status, out, _ = command("sensitivity")
    assert status == 1
    assert out.index("faults that nothing sees") < out.index("survivor") < out.index("judgements")
    assert "1 of 2 faults are seen (50 %)" in out
    status, out, _ = command("sensitivity", "--json")
    assert status == 1
    assert [fault["name"] for fault in json.loads(out)["faults"]] == ["survivor", "seen"]


def test_a_machine_is_told_everything(command: Command, measured: Callable[..., None]) -> None:
    """One record for each fault, with what each judgement needed."""
    measured(SEEN, NONE)
    said = json.loads(command("sensitivity", "--json")[1])
    seen, none = said["faults"]
    assert (seen["name"], seen["kind"], seen["killed_by"]) == ("seen", "mechanical", {"purity": "p", "laws": "l"})
    laws = {"case": "l", "payload": "random", "layout": "contiguous", "needed": ["batch 2"]}
    assert seen["sightings"]["laws"] == laws
    assert none["equivalent"] == "both are one test"
    assert said["judgements"]["laws"]["alone"] == []
    assert "knows its contract's tables" in said["judgements"]["laws"]["never alone"]


def test_evidence_is_left_and_can_be_read(command: Command, measured: Callable[..., None], tmp_path: Path) -> None:
    """Counts and survivors for the gate, and beside them every record."""
    measured(SEEN, SURVIVOR, BLOCKED, NONE)
    assert command("sensitivity", "--out", "evidence")[0] == 1
    (document,) = load(tmp_path / "evidence").documents
    found = document["sensitivity"]
    assert (found["judged"], found["seen"], found["survivors"]) == (2, 1, ["survivor"])
    assert (found["blocked"], found["equivalent"], found["judging"]) == (1, 1, sensitivity_hash())
    assert document["run"]["exit status"] == 1
    details = json.loads((tmp_path / "evidence" / "sensitivity.json").read_text())
    assert next(fault["name"] for fault in details["faults"]) == "survivor"


def test_the_judges_own_failure_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence and status 4."""

    def fails(*_: object, **__: object) -> None:
        raise SensitivityError("a process that judges ended: killed")

    monkeypatch.setattr(sensitivity, "measure", fails)
    status, out, _ = command("sensitivity")
    assert status == 4
    assert "the judge failed: a process that judges ended: killed" in out


def test_what_cannot_be_carried_out_is_refused(command: Command, tmp_path: Path) -> None:
    """Before anything is measured: an unknown fault, a page that is none, a page of one fault."""
    (tmp_path / "empty.md").write_text("# Nothing\n")
    for arguments, says in (
        (("--fault", "nosuch"), "--fault must be one of"),
        (("--out", "empty.md"), "--out"),
        (("--markdown", "missing.md"), "--markdown must name a page that exists"),
        (("--markdown", "empty.md"), "the page must hold <!-- begin judgements -->"),
        (("--markdown", "empty.md", "--fault", "axes-swapped"), "--markdown must not be given with --fault"),
    ):
        status, _, error = command("sensitivity", *arguments)
        assert status == 2
        assert says in error
        assert len(error.splitlines()) == 1


def test_a_run_says_nothing_but_its_result(shell: Command) -> None:
    """What exporters and profilers print in the processes that judge is not shown; a fault of each is seen."""
    status, out, error = shell("sensitivity", "--json", "--plan", "smoke", "-n", "1", "--fault", "not-exportable",
                               "--fault", "library-not-loaded")  # fmt: skip
    assert status == 0
    assert [fault["only_by"] for fault in json.loads(out)["faults"]] == ["export", "provenance"]
    assert not [line for line in error.splitlines() if "faults x judgements" not in line and line.strip()]


def test_a_page_is_filled_in_between_its_markers(
    command: Command, measured: Callable[..., None], tmp_path: Path
) -> None:
    """What stood between them goes, what stands around them stays, and a second time changes nothing."""
    measured(SEEN, ALONE, BLOCKED, NONE)
    page = tmp_path / "page.md"
    places = "".join(f"<!-- begin {name} -->\nwhat was there\n<!-- end {name} -->\n" for name in MARKERS)
    page.write_text(f"before\n{places}after\n")
    assert command("sensitivity", "--markdown", "page.md")[0] == 0
    text = page.read_text()
    assert "what was there" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| alone | alone is wrong | neox, bfloat16 | purity | x view packed-qkv |" in text
    assert "| blocked | blocked is wrong | neox, bfloat16 | needs a CUDA GPU |  |" in text
    assert command("sensitivity", "--markdown", "page.md")[0] == 0
    assert page.read_text() == text


def committed() -> dict[str, list[list[str]]]:
    """The rows of each generated table of the committed page."""
    text, found = PAGE.read_text(), {}
    for name in MARKERS:
        between = text.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]
        lines = [line for line in between.splitlines() if line.startswith("| ")]
        found[name] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return found


def test_the_committed_page_is_of_this_dictionary() -> None:
    """Every fault and every report is in it, once, with its own sentence, and nothing else is."""
    page = committed()
    for kind in ("semantic", "mechanical"):
        said = {name: (says, of) for name, says, of, *_ in page[f"{kind} faults"]}
        assert len(said) == len(page[f"{kind} faults"])
        faults = (fault for fault in FAULTS.values() if fault.kind == kind)
        assert said == {f.name: (f.says.replace("|", "&#124;"), f"{f.contract}, {f.dtype}") for f in faults}
    assert tuple(row[0] for row in page["reports"]) == REPORTS
    standing = {name for row in page["reports"] for name in row[1].split(", ") if name}
    assert standing == {name for name, fault in FAULTS.items() if fault.rows}


def test_the_committed_page_shows_every_fault_seen() -> None:
    """No fault survives in it, its judgements exist, and what one judgement alone sees is where the table says."""
    page = committed()
    rows = [row for kind in ("semantic", "mechanical") for row in page[f"{kind} faults"]]
    assert "**nothing**" not in {row[3] for row in rows}
    for name, sees, alone, those in page["judgements"]:
        seen = [row[0] for row in rows if name in row[3].split(", ")]
        assert name in JUDGEMENTS
        assert len(seen) == int(sees)
        assert [row[0] for row in rows if row[3] == name] == (those.split(", ") if int(alone) else [])


def test_tables_escape_what_would_end_a_cell() -> None:
    """A bar in a sentence is no column."""
    made = tables(Sensitivity([record("a"), Record("b", "semantic", "x | y", "rotate", "neox", "bfloat16")]))
    assert "| b | x &#124; y |" in made["semantic faults"]
    assert "**nothing**" in made["mechanical faults"]


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    """The message names the markers."""
    with pytest.raises(ValueError, match="begin reports"):
        filled_in("".join(f"<!-- begin {n} -->\n<!-- end {n} -->\n" for n in MARKERS[:-1]), dict.fromkeys(MARKERS, ""))
