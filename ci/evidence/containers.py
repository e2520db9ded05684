"""Containers: the files of evidence, in a folder or in one zip file, looked at before they are read.

Nothing is unpacked: a member is read into memory, after its size was seen to be within bounds. A name that leads
elsewhere, a link, a device, a member that is there twice are refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from ..text import plain
from .form import LARGEST, LARGEST_FILE, MANIFEST, MOST_FILES, EvidenceError

_BLOCK = 1 << 20


class Container:
    """The files of one folder or zip file by name, a path within it with slashes. ``origin`` is what it was opened as.

    Raises :class:`EvidenceError` for anything in it that is no plain file of a bounded size.
    """

    def __init__(self, origin: Path) -> None:
        self.origin = plain(origin)
        self._path = origin
        if origin.is_dir():
            self._zip = None
            sizes = dict(self._of_folder(origin))
        elif origin.is_file():
            try:
                self._zip = zipfile.ZipFile(origin)
            except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
                raise EvidenceError(f"{self.origin} is neither a folder nor a zip file: {plain(error)}") from None
            sizes = dict(self._of_zip(self._zip))
        else:
            raise EvidenceError(f"{self.origin} does not exist")
        for name, size in sizes.items():
            if size > LARGEST_FILE:
                raise EvidenceError(f"{self.origin}: {plain(name)} is larger than {LARGEST_FILE >> 20} MiB")
        if sum(sizes.values()) > LARGEST:
            raise EvidenceError(f"{self.origin} holds more than {LARGEST >> 20} MiB")
        self._sizes = sizes

    @property
    def names(self) -> list[str]:
        """The names of all files, sorted."""
        return sorted(self._sizes)

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises :class:`EvidenceError` where there is none or it has no such size."""
        if name not in self._sizes:
            raise EvidenceError(f"{self.origin} holds no {name}")
        with self._open(name) as stream:
            content = stream.read(self._sizes[name] + 1)
        return self._whole(name, len(content), content)

    def sha256(self, name: str) -> str:
        """SHA-256 of a file's bytes, in hexadecimal."""
        total, length = hashlib.sha256(), 0
        with self._open(name) as stream:
            while block := stream.read(_BLOCK):
                length += len(block)
                total.update(block)
                if length > self._sizes[name]:
                    break
        self._whole(name, length, b"")
        return total.hexdigest()

    def _whole(self, name: str, length: int, content: bytes) -> bytes:
        if length != self._sizes[name]:
            raise EvidenceError(f"{self.origin}: {plain(name)} does not have the size that it is listed with")
        return content

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._zip.open(name) if self._zip is not None else (self._path / name).open("rb") as stream:
                yield stream
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError) as error:
            raise EvidenceError(f"{self.origin}: {plain(name)} cannot be read: {plain(error)}") from None

    def _of_folder(self, folder: Path) -> Iterator[tuple[str, int]]:
        count = 0
        remaining = [folder]
        while remaining:
            for entry in sorted(os.scandir(remaining.pop()), key=lambda e: e.name):
                found = entry.stat(follow_symlinks=False)
                name = Path(entry.path).relative_to(folder).as_posix()
                count += 1
                if count > MOST_FILES:
                    raise EvidenceError(f"{self.origin} holds more than {MOST_FILES} files")
                if stat.S_ISDIR(found.st_mode):
                    remaining.append(Path(entry.path))
                elif stat.S_ISREG(found.st_mode):
                    yield name, found.st_size
                else:
                    raise EvidenceError(f"{self.origin}: {plain(name)} is {_kind(found.st_mode)}, and no file")

    def _of_zip(self, archive: zipfile.ZipFile) -> Iterator[tuple[str, int]]:
        members = archive.infolist()
        if len(members) > MOST_FILES:
            raise EvidenceError(f"{self.origin} holds more than {MOST_FILES} files")
        seen = set()
        for member in members:
            name, said = member.filename, plain(member.filename)
            # As the archive has it: the module turns a backslash into a slash, and ends a name at a zero byte.
            if member.orig_filename != name or not is_inside(name.removesuffix("/")):
                raise EvidenceError(f"{self.origin}: the member {said} leads out of the folder")
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise EvidenceError(f"{self.origin}: {said} is {_kind(kind)}, and no file")
            if name in seen:
                raise EvidenceError(f"{self.origin} holds {said} twice")
            seen.add(name)
            if name.endswith("/"):
                continue
            if member.flag_bits & 0x1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise EvidenceError(f"{self.origin}: {said} is encrypted, or packed in another way than evidence is")
            yield name, member.file_size


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a device, a pipe or a socket"


def is_inside(name: str) -> bool:
    """Whether a file of this name lies in the folder that it is relative to, on any system."""
    path = PurePosixPath(name)
    plain_parts = all(part not in ("", ".", "..") for part in name.split("/"))
    return bool(name) and plain_parts and not path.is_absolute() and not any(c in name for c in "\\\0:")


def check_manifest(container: Container, hashes: dict[str, str]) -> None:
    """Raise :class:`EvidenceError` unless the files are those that the manifest lists, byte for byte."""
    for name in sorted(hashes):
        if not is_inside(name):
            raise EvidenceError(f"{container.origin}: {MANIFEST} names {plain(name)}, which leads out of the folder")
    files = set(container.names) - {MANIFEST}
    if extra := sorted(files - set(hashes)):
        raise EvidenceError(f"{container.origin}: {plain(extra[0])} is not in {MANIFEST}: it was added after the run")
    if lost := sorted(set(hashes) - files):
        raise EvidenceError(f"{container.origin}: {plain(lost[0])} is in {MANIFEST} and not there")
    for name in sorted(files):
        if container.sha256(name) != hashes[name]:
            raise EvidenceError(f"{container.origin}: {plain(name)} is not as {MANIFEST} says: it was changed")
