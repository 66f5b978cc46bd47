"""Cuts archives of packages into pieces, and joins the pieces. The pieces are written on a machine with a network, and
joined on a machine without a network.

A part is a folder of packages, such as vllm/. Each part is written as a zip archive, and the archive is cut into
pieces. manifest.json names all parts, archives and pieces with their sizes and digests. The pieces may arrive in any
order. `join` may be called after each arrived piece. Each call of `join` keeps the pieces that have arrived, and
unpacks every part of which all pieces have arrived. This file uses only the standard library, because `join` runs on
the machine without a network.
"""

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

MANIFEST = "manifest.json"
_CHUNK = 2**20
_KEPT = ".pieces"
_NAME = re.compile(r"\w[\w.-]*")
"""Valid names of parts and pieces. A valid name contains no folder and does not begin with a dot."""
_IN_DATA_FOLDER = re.compile(r"[^/]+\.data/(?:purelib|platlib)/(.+)")


class PieceError(Exception):
    """A piece or an archive differs from its size or digest in the manifest, or there is no manifest."""


@dataclass(frozen=True)
class Piece:
    """One piece of an archive: a file that is copied to the GPU machine."""

    name: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True)
class Part:
    """A folder of packages whose archive is cut into pieces. `size` and `sha256` are the size and the digest of the
    whole archive.
    """

    name: str
    size: int
    sha256: str
    versions: Mapping[str, str]
    pieces: Sequence[Piece]

    def __post_init__(self) -> None:
        _check_name(self.name)


def _check_name(name: str) -> None:
    """Raise ValueError for a name that could lead out of its folder. `join` writes and removes files with the names in
    the manifest, so a name that contains a path would be dangerous.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file")


def write_archive(
    archive: Path, wheels: Iterable[Path], files: Mapping[str, Path], left_out: Sequence[str] = ()
) -> None:
    """Write a zip archive of a folder for PYTHONPATH. The archive contains the wheels' files and the additional
    `files`, which are given by their names in the archive.

    Files named in `left_out`, and the wheels' command-line programs, are omitted. Two archives with equal contents have
    equal bytes.
    """
    written = set(files)
    with zipfile.ZipFile(archive, "w") as target:
        for name, path in sorted(files.items()):
            with open(path, "rb") as source:
                _copy_into(target, name, source)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as content:
                for entry in content.infolist():
                    place = _place_of(entry.filename)
                    if entry.is_dir() or place is None or place in written or place in left_out:
                        continue
                    written.add(place)
                    with content.open(entry) as source:
                        _copy_into(target, place, source)


def _place_of(name: str) -> str | None:
    """The path, in the folder for PYTHONPATH, of a file in a wheel. Returns None for a file that is installed
    elsewhere, such as a program.
    """
    if ".data/" not in name.partition("/")[0] + "/":
        return name
    found = _IN_DATA_FOLDER.fullmatch(name)
    return found[1] if found else None


def _copy_into(target: zipfile.ZipFile, name: str, source: IO[bytes]) -> None:
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    with target.open(entry, "w", force_zip64=True) as place:
        shutil.copyfileobj(source, place, _CHUNK)


def cut(archive: Path, folder: Path, piece_bytes: int, versions: Mapping[str, str]) -> Part:
    """Write the archive's pieces into the folder, and remove the archive. The names of the pieces begin with the
    archive's name.
    """
    pieces: list[Piece] = []
    with open(archive, "rb") as source:
        while content := source.read(piece_bytes):
            piece = Piece(f"{archive.name}.{len(pieces):02}", len(content), hashlib.sha256(content).hexdigest())
            (folder / piece.name).write_bytes(content)
            pieces.append(piece)
    part = Part(archive.stem, archive.stat().st_size, _digest(archive), versions, pieces)
    archive.unlink()
    return part


def write_manifest(folder: Path, parts: Iterable[Part]) -> None:
    (folder / MANIFEST).write_text(json.dumps([asdict(part) for part in parts], indent=1) + "\n")


def read_manifest(folder: Path) -> list[Part]:
    """Read the manifest. Raises PieceError if the folder has no manifest."""
    try:
        return [
            Part(**part | {"pieces": [Piece(**piece) for piece in part["pieces"]]})
            for part in json.loads((folder / MANIFEST).read_text())
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PieceError(f"{folder / MANIFEST} cannot be read as a manifest: {error}") from error


def join(folder: Path, into: Path) -> dict[str, list[str]]:
    """Keep the pieces that have arrived, and unpack each part of which all pieces are kept. A part is unpacked to the
    folder of the part's name.

    Returns, for each part, the names of the pieces that are still missing. The list of an unpacked part is empty.
    Raises PieceError if a file's digest differs from the manifest.
    """
    kept = into / _KEPT
    kept.mkdir(parents=True, exist_ok=True)
    lacking: dict[str, list[str]] = {}
    for part in read_manifest(folder):
        mark = into / f"{part.name}.sha256"
        lacking[part.name] = []
        if mark.exists() and mark.read_text() == part.sha256:
            continue
        for piece in part.pieces:
            if not _keep(piece, folder, kept):
                lacking[part.name].append(piece.name)
        if not lacking[part.name]:
            mark.unlink(missing_ok=True)
            _unpack(part, kept, into / part.name)
            mark.write_text(part.sha256)
    return lacking


def _keep(piece: Piece, folder: Path, kept: Path) -> bool:
    """Copy the piece to the folder `kept` if the piece has arrived. Returns whether `kept` contains the piece now."""
    if (kept / piece.name).is_file() and _digest(kept / piece.name) == piece.sha256:
        return True
    if not (folder / piece.name).is_file():
        return False
    if _digest(folder / piece.name) != piece.sha256:
        size = (folder / piece.name).stat().st_size
        raise PieceError(f"{folder / piece.name} is damaged or of another pack: {size} bytes, of {piece.size}")
    shutil.copyfile(folder / piece.name, kept / piece.name)
    return True


def _unpack(part: Part, kept: Path, place: Path) -> None:
    archive, unpacked = kept / f"{part.name}.zip", kept / part.name
    with open(archive, "wb") as whole:
        for content in _contents(part.pieces, kept):
            whole.write(content)
    if _digest(archive) != part.sha256:
        raise PieceError(f"the pieces of {part.name} make another archive than the manifest names")
    for older in (unpacked, place):
        shutil.rmtree(older, ignore_errors=True)
    with zipfile.ZipFile(archive) as whole_archive:
        whole_archive.extractall(unpacked)
    unpacked.rename(place)
    for file in (archive, *(kept / piece.name for piece in part.pieces)):
        file.unlink()


def _contents(pieces: Sequence[Piece], kept: Path) -> Iterator[bytes]:
    for piece in pieces:
        yield (kept / piece.name).read_bytes()


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
