"""Each way in which evidence can be broken, refused in one sentence that says which."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.evidence import containers, form
from ropecheck.ci.evidence.form import EvidenceError
from ropecheck.ci.evidence.packing import pack
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.evidence.statement import statement

Made = Any
Break = Callable[[Path], object]


@pytest.fixture
def folder(made: Made) -> Path:
    """Good evidence in the full form, with a log."""
    verdicts = [made.verdict(facts={"elements": 3}), made.verdict("two", "fail", reason="why")]
    folder: Path = made.written("report", verdicts, exit_status=1)
    assert load(folder).verdicts is not None
    return folder


def closed(folder: Path) -> None:
    """Make the statement and the manifest fit what was changed: what is wrong then is the content alone."""
    try:
        content = (folder / "evidence.json").read_bytes()
        document = json.loads(content)
        told = statement(document.get("parts", [document]), hashlib.sha256(content).hexdigest())
        (folder / "statement.json").write_text(json.dumps(told))
    except Exception:
        # Then the reader does not come as far as the statement.
        pass
    names = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")
    hashes = {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in names}
    (folder / "manifest.json").write_text(json.dumps({"schema": form.MANIFEST_SCHEMA, "sha256": hashes}))


def changed(name: str, change: Callable[[Any], object]) -> Break:
    """The JSON file ``name`` changed, and everything else made to fit."""

    def broken(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))
        closed(folder)

    return broken


def replaced(name: str, old: str, new: str) -> Break:
    """The text of the file ``name`` changed, and everything else made to fit."""

    def broken(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
        closed(folder)

    return broken


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Set what lies at ``path`` of a JSON value; a path that ends in a dash takes it away."""

    def change(document: Any) -> None:
        *steps, last = path.split("/")
        for step in steps:
            document = document[int(step) if isinstance(document, list) else step]
        if last.endswith("-"):
            del document[last[:-1]]
        else:
            document[int(last) if isinstance(document, list) else last] = value

    return change


def unclosed(name: str, old: str, new: str) -> Break:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


def linked(folder: Path) -> None:
    (folder / "cpu" / "pytest.log").unlink()
    os.symlink("/etc/hostname", folder / "cpu" / "pytest.log")


def in_manifest(change: Callable[[Any], object]) -> Break:
    def broken(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return broken


def twice(path: str) -> Callable[[Any], None]:
    return lambda document: document[path].append(dict(document[path][0]))


E, V = "evidence.json", "verdicts.json"
BROKEN: dict[str, tuple[Break, str]] = {
    "half-written": (lambda f: (f / "manifest.json").unlink(), r"holds no manifest\.json: the run that wrote it did"),
    "a file edited": (unclosed(V, '"pass"', '"fail"'), r"verdicts\.json is not as manifest\.json says"),
    "the log edited": (unclosed("cpu/pytest.log", "1", "2"), r"cpu/pytest\.log is not as manifest\.json says"),
    "a file lost": (lambda f: (f / "cpu" / "pytest.log").unlink(), r"cpu/pytest\.log is in manifest\.json and not"),
    "a file added": (lambda f: (f / "more.txt").write_text("x"), r"more\.txt is not in manifest\.json: it was added"),
    "a link": (linked, r"cpu/pytest\.log is a link, and no file"),
    "a pipe": (lambda f: os.mkfifo(f / "pipe"), "pipe is a device, a pipe or a socket"),
    "a manifest that is no JSON": (lambda f: (f / "manifest.json").write_text("{"), r"manifest\.json is not JSON"),
    "a manifest of another form": (in_manifest(put("sha256", {"a": 1})), r"manifest\.json: sha256/a must be string"),
    "a path that leads out": (in_manifest(put("sha256/..\\x", 64 * "0")), "leads out of"),
    "no evidence": (lambda f: [(f / E).unlink(), closed(f)], r"holds no evidence\.json"),
    "no statement": (lambda f: [(f / "statement.json").unlink(), closed_without_statement(f)], "no statement"),
    "the statement edited": (lambda f: [unclosed("statement.json", "FAILED", "PASSED")(f), closed_without_statement(f)],
                             r"statement\.json does not say what evidence\.json says"),
    "a schema of the future": (changed(E, put("schema", "ropecheck-evidence/2")), "has schema ropecheck-evidence/2, "),
    "verdicts of no schema": (changed(V, put("schema", None)), "has schema None, and not ropecheck-verdicts/1"),
    "a list": (lambda f: [(f / E).write_text("[]"), closed(f)], "must hold a JSON object"),
    "a member missing": (changed(E, put("judging-", None)), r"evidence\.json: it lacks judging"),
    "a member of a cell missing": (changed(E, put("cells/0/cases-", None)), "cells/0 lacks cases"),
    "an unknown member": (changed(E, put("cells/0/passed", 9)), "cells/0 holds passed, which evidence has not"),
    "a number as text": (changed(E, put("cells/0/pass", "9")), "cells/0/pass must be integer"),
    "a count below one": (changed(E, put("cells/0/fail", 0)), "cells/0/fail breaks the rule minimum"),
    "a name of another form": (changed(E, put("cells/0/candidate", "a b")), "cells/0/candidate is a b, which is not"),
    "a line break in a name": (changed(E, put("candidates/0/name", "mine/right\n")), "candidates/0/name is mine/right"),
    "an unknown runner": (changed(E, put("environment/runner", "cloud")), "must be one of hosted, self-hosted, local"),
    "an unknown kind": (changed(E, put("run/kind", "dream")), "run/kind must be one of verify, sanitize, sensitivity"),
    "a moment without a zone": (changed(E, put("run/started", "2026-07-01T12:00:00")), "run/started is 2026-07-01T12"),
    "an unknown verdict": (changed(V, put("verdicts/0/verdict", "passed")), "must be one of pass, fail, not-appl"),
    "a case judged twice": (changed(V, twice("verdicts")), "two verdicts on purity/cpu/float32/one of mine/right"),
    "a fact of the wrong type": (changed(V, put("verdicts/0/facts/elements", "many")), "elements of .* a whole number"),
    "a verdict changed": (changed(V, put("verdicts/1/verdict", "pass")), "does not count in mine/right x purity x cpu"),
    "a case renamed": (changed(V, put("verdicts/0/case", "purity/cpu/float32/easy")), "does not count in mine/right x"),
    "a cell changed": (changed(E, put("cells/0/pass", 2)), "does not count in mine/right x purity x cpu x float32"),
    "a cell lost": (changed(E, put("cells", [])), "does not count in mine/right x purity"),
    "a cell twice": (changed(E, twice("cells")), "holds the cell mine/right x purity x cpu x float32 twice"),
    "a cell without a case": (changed(E, lambda d: [d["cells"][0].pop(v) for v in ("pass", "fail")]), "without a case"),
    "a candidate twice": (changed(E, twice("candidates")), "lists candidate mine/right twice"),
    "a candidate lost": (changed(E, put("candidates", [])), "lists no candidate mine/right of contract neox"),
    "a judgement without a hash": (changed(E, put("judging", {})), "does not say what code judged mine/right x purity"),
    "a number that is none": (replaced(E, '"seconds":1.5', '"seconds":NaN'), "holds NaN, which is no number"),
    "an infinity": (replaced(E, '"seconds":1.5', '"seconds":-Infinity'), "holds -Infinity, which is no number"),
    "a number too large": (replaced(E, '"seconds":1.5', '"seconds":1e999'), "holds the number 1e999, which is too"),
    "a number too long": (replaced(E, '"seconds":1.5', f'"seconds":{"7" * 5000}'), r"the number 7+\.\., which is"),
    "a key twice": (replaced(E, '"seconds":1.5', '"seconds":1.5,"seconds":2'), "holds the key 'seconds' twice"),
    "too deep": (replaced(V, '"facts":{', '"facts":{"x":%s,' % ("[" * 30 + "]" * 30)), "more than 24 deep"),
    "much too deep": (replaced(V, '"facts":{', '"facts":{"x":%s,' % ("[" * 10**5 + "]" * 10**5)), "more than 24 deep"),
    "no UTF-8": (lambda f: [(f / E).write_bytes(b'{"schema": "\xff"}'), closed(f)], r"evidence\.json is not UTF-8"),
    "verdicts of no run": (lambda f: [(f / "cuda").mkdir(), (f / "cuda" / V).write_text("{}"), closed(f)],
                           r"cuda/verdicts\.json belongs to no run"),
    "coverage that was not measured": (changed(E, put("sensitivity", {
        "faults": 9, "judged": 9, "seen": 8, "blocked": 0, "equivalent": 0, "coverage": 1.0, "survivors": [],
        "judging": 64 * "0"})), "the numbers of sensitivity do not agree"),
}  # fmt: skip


def closed_without_statement(folder: Path) -> None:
    told = folder / "statement.json"
    kept = told.read_bytes() if told.exists() else None
    closed(folder)
    told.unlink()
    if kept is not None:
        told.write_bytes(kept)
    in_manifest(lambda m: m["sha256"].pop("statement.json"))(folder)
    if kept is not None:
        in_manifest(put("sha256/statement.json", hashlib.sha256(kept).hexdigest()))(folder)


@pytest.mark.parametrize(("broken", "sentence"), BROKEN.values(), ids=BROKEN)
def test_broken_evidence_is_refused(folder: Path, broken: Break, sentence: str) -> None:
    """The sentence names the file and what is wrong with it, on one line."""
    broken(folder)
    with pytest.raises(EvidenceError, match=sentence) as refused:
        load(folder)
    assert "report" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


def zipped(folder: Path, members: Callable[[zipfile.ZipFile], object]) -> Path:
    """The evidence of ``folder`` in one file, with more members."""
    path = folder.parent / "one.zip"
    pack(load(folder), path)
    with zipfile.ZipFile(path, "a") as archive:
        members(archive)
    return path


def member(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("x")
    info.filename, info.external_attr = name, mode << 16
    return info


ZIPS: dict[str, tuple[Callable[[zipfile.ZipFile], object], str]] = {
    "a path upwards": (lambda z: z.writestr(member("../x"), "x"), r"the member \.\./x leads out of the folder"),
    "an absolute path": (lambda z: z.writestr(member("/etc/x"), "x"), "the member /etc/x leads out of the folder"),
    "a path with a drive": (lambda z: z.writestr(member("c:/x"), "x"), "the member c:/x leads out of the folder"),
    "a backslash": (lambda z: z.writestr(member("..\\x"), "x"), r"the member .* leads out of the folder"),
    "a link": (lambda z: z.writestr(member("x", stat.S_IFLNK | 0o777), "/etc/passwd"), "x is a link, and no file"),
    "a device": (lambda z: z.writestr(member("x", stat.S_IFBLK | 0o777), ""), "x is a device, a pipe or a socket"),
    "a member twice": (lambda z: z.writestr(member("evidence.json"), "{}"), r"holds evidence\.json twice"),
    "another packing": (lambda z: z.writestr(member("x"), "x", zipfile.ZIP_LZMA), "packed in another way"),
    "a member more": (lambda z: z.writestr(member("x"), "x"), r"x is not in manifest\.json"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("members", "sentence"), ZIPS.values(), ids=ZIPS)
def test_a_broken_zip_is_refused(folder: Path, members: Callable[[zipfile.ZipFile], object], sentence: str) -> None:
    """Nothing is unpacked, and what a member may not be is refused before it is read."""
    path = zipped(folder, members)
    with pytest.raises(EvidenceError, match=sentence):
        load(path)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["mine.py", "one.zip", "report"]


def test_a_zip_bomb_is_refused_before_it_is_read(folder: Path) -> None:
    """A thousandfold packing is measured by what it says it unpacks to."""
    path = zipped(folder, lambda z: z.writestr("big", bytes(form.LARGEST_FILE + 1), zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 2**20
    with pytest.raises(EvidenceError, match="big is larger than 64 MiB"):
        load(path)


def test_a_member_that_unpacks_to_more_than_it_says_is_refused(folder: Path) -> None:
    """A size that was made small in the archive's directory does not let more bytes through."""
    path = zipped(folder, lambda z: z.writestr("big", bytes(10**6), zipfile.ZIP_DEFLATED))
    content = bytearray(path.read_bytes())
    for position in range(len(content) - 4):
        if content[position : position + 4] == struct.pack("<I", 10**6):
            content[position : position + 4] = struct.pack("<I", 7)
    path.write_bytes(content)
    manifest = {"big": hashlib.sha256(bytes(7)).hexdigest()}
    with pytest.raises(EvidenceError, match=r"big (cannot be read|does not have the size|is not in manifest)"):
        load(path)
    with pytest.raises(EvidenceError, match="big"):
        containers.Container(path).read(next(iter(manifest)))


def test_sizes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, all files together, and their number, in a folder as in a zip file."""
    path = zipped(folder, lambda z: None)
    for limit, value, sentence in (
        ("LARGEST_FILE", 100, "is larger than"), ("LARGEST", 200, "holds more than"), ("MOST_FILES", 2, "2 files")
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(containers, limit, value)
            for where in (folder, path):
                with pytest.raises(EvidenceError, match=sentence):
                    load(where)
    assert load(path).documents == load(folder).documents


@pytest.mark.parametrize("there", ["nothing", "text"])
def test_what_is_no_evidence_at_all_is_refused(tmp_path: Path, there: str) -> None:
    """A path that does not exist, and a file of something else."""
    path = tmp_path / "x.zip"
    if there == "text":
        path.write_text("evidence")
    with pytest.raises(EvidenceError, match=r"does not exist|is neither a folder nor a zip file"):
        load(path)


def test_reading_runs_nothing(folder: Path) -> None:
    """A file that a careless reader would unpickle, import or run is bytes with a hash."""
    ran = folder.parent / "ran"
    payload = f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode()
    for name in ("verdicts.pkl", "conftest.py", "sitecustomize.py"):
        (folder / name).write_bytes(payload if name.endswith("pkl") else f"open({str(ran)!r}, 'w')".encode())
    closed(folder)
    assert "conftest.py" in load(folder).container.names
    assert not ran.exists()


def test_without_its_package_reading_says_which(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that only writes evidence does without jsonschema, and is told so where it reads."""
    monkeypatch.setitem(__import__("sys").modules, "jsonschema.exceptions", None)
    with pytest.raises(EvidenceError, match="needs the package jsonschema: pip install jsonschema"):
        load(folder)
