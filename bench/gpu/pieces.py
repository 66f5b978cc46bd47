"""Cuts archives of packages into pieces on a machine with a network, and joins them on one without.

Each part, such as vllm/, is a zip archive that is cut into pieces. manifest.json names all with their sizes and
digests. Pieces may arrive in any order. Each call of `join` keeps the arrived pieces and unpacks every complete part.
Only the standard library is used.
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
"""Names of parts and pieces: no folder, no leading dot."""
_IN_DATA_FOLDER = re.compile(r"[^/]+\.data/(?:purelib|platlib)/(.+)")


class PieceError(Exception):
    """A piece or an archive differs from the manifest, or there is no manifest."""


@dataclass(frozen=True)
class Piece:
    """A file that is copied to the GPU machine."""

    name: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True)
class Part:
    """A folder of packages. `size` and `sha256` are the whole archive's."""

    name: str
    size: int
    sha256: str
    versions: Mapping[str, str]
    pieces: Sequence[Piece]

    def __post_init__(self) -> None:
        _check_name(self.name)


def _check_name(name: str) -> None:
    """Raise ValueError for a name that leads out of its folder, because `join` writes and removes files by name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file")


def write_archive(
    archive: Path, wheels: Iterable[Path], files: Mapping[str, Path], left_out: Sequence[str] = ()
) -> None:
    """Write the wheels' files and the additional `files`, by name in the archive, as a zip archive for PYTHONPATH.

    `left_out` and the wheels' programs are omitted. Equal contents give equal bytes.
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
    """A wheel's file in the folder for PYTHONPATH, or None for one installed elsewhere, such as a program."""
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
    """Write the archive's pieces, named after it, into the folder, and remove the archive."""
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
    """Raises PieceError if the folder has no manifest."""
    try:
        return [
            Part(**part | {"pieces": [Piece(**piece) for piece in part["pieces"]]})
            for part in json.loads((folder / MANIFEST).read_text())
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PieceError(f"{folder / MANIFEST} cannot be read as a manifest: {error}") from error


def join(folder: Path, into: Path) -> dict[str, list[str]]:
    """Keep the pieces that have arrived, and unpack each complete part to the folder of its name.

    Returns each part's missing pieces. Raises PieceError if a digest differs from the manifest.
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
    """Copy the piece to `kept` if it has arrived. Returns whether `kept` has it."""
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
