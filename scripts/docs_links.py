"""A hook of MkDocs: README.md becomes the first page, and links to files outside of docs/ become the files' paths.

MkDocs checks links between pages and their anchors (`--strict`). A link to a missing file ends the build.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds README.md as index.md."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=(_ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    """Mends links out of docs/. Raises ValueError for a missing file."""
    source = page.file.src_uri
    folder = "" if source == "index.md" else posixpath.dirname(f"docs/{source}")

    def mend(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if target.startswith(("http://", "https://", "mailto:")):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (_ROOT / path).exists():
            raise ValueError(f"{source} links to {target}, which is not there")
        if path == "README.md":
            path = "docs/index.md"
        if path.startswith("docs/") and path != "docs/":
            inside = posixpath.relpath(path, folder or "docs")
            return f"{image}[{text}]({inside}{anchor})"
        return f"`{path}`" if path in text else f"{text} (`{path}`)"

    return _LINK.sub(mend, markdown)
