"""Hooks of `make docs`: pages may link to any file of the repository, and load nothing from another host.

Markdown files outside docs/ that a page links to become pages below repository/; other files are copied there as text.
Links are rewritten accordingly, so that pages on disk need no change.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = "repository"
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_CODE = re.compile(r"^( *)```.*?^\1```|``.+?``|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LOADS = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*?\bhref=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|@import\s+[^;]*//[^;]+|url\([\"']?(?:https?:)?//[^)]+",
)

POLICY = (
    "default-src 'none'; connect-src 'self'; font-src 'self'; img-src 'self' data:; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; worker-src 'self'"
)
"""The theme's script would load polyfills for old browsers from another host; this forbids it."""


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    unread = [DOCS / file.src_uri for file in files.documentation_pages()]
    found: dict[Path, None] = {ROOT / "README.md": None}
    unread.append(ROOT / "README.md")
    while unread:
        page = unread.pop()
        for target, _ in _targets(page.read_text(), page):
            if target.is_file() and not target.is_relative_to(DOCS) and target not in found:
                found[target] = None
                if target.suffix == ".md":
                    unread.append(target)
    for path in found:
        files.append(File.generated(config, _uri(path), content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to files by their places in the site. A link to a folder becomes its text."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else DOCS / uri
    markdown = re.sub(r"\[([^\]]+)\]\(([^)\s#]+)\)", lambda link: _without_folder(link, source), markdown)
    return _outside_code(markdown, lambda text: _LINK.sub(lambda link: _rewritten(link[0], source, uri), text))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Forbid browsers requests to other hosts. Raises PluginError if the page itself loads a file from one."""
    if loads := _LOADS.search(output):
        raise PluginError(f"{page.file.src_uri} loads a file of another host: {loads[0]}")
    return output.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{POLICY}">', 1)


def _without_folder(link: re.Match[str], source: Path) -> str:
    return link[1] if "://" not in link[2] and (source.parent / link[2]).is_dir() else link[0]


def _targets(markdown: str, source: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor of each link to a file."""
    for link in _LINK.findall(_CODE.sub("", markdown)):
        name, _, anchor = link.partition("#")
        if name and "://" not in name and not name.startswith("mailto:"):
            yield (source.parent / name).resolve(), anchor


def _rewritten(link: str, source: Path, uri: str) -> str:
    name, mark, anchor = link.partition("#")
    if not name or "://" in name:
        return link
    path = (source.parent / name).resolve()
    return relpath(_uri(path), str(Path(uri).parent)) + mark + anchor if path.is_file() else link


def _uri(path: Path) -> str:
    """The place of a file in the site. A file that is no page is text, so that browsers show it."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return uri if path.suffix in (".md", ".svg") else f"{uri}.txt"


def _outside_code(markdown: str, change: Any) -> str:
    parts, last = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, change(markdown[last:])])
