"""What the site has besides the pages in docs/: hooks of `mkdocs build`.

    README.md, CONTRIBUTING.md, CHANGELOG.md  ──▶  index.md, contributing.md, changes.md
    docs/NAME.ipynb, with the stored outputs  ──▶  NAME.md, and its pictures
    the public names, with their types        ──▶  reference/signatures.md, by mkdocstrings

A link follows the file that it names to its page; one to a file that has no page becomes its text.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from make_api import members, pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
SIGNATURES = """\
# The library: signatures

The public names with the types of their arguments, from the docstrings.
[Functions](api.md), [world](api-world.md), and [averages and errors](api-averages.md) are the same
as text.

"""
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s:]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text isn't in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for notebook in (ROOT / "docs").glob("*.ipynb"):
        for name, content in _shown(notebook).items():
            files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "reference/signatures.md", content="".join(_signatures())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have the links of a page lead to pages."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def followed(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        path, hash_mark, heading = target.partition("#")
        if not path:
            return link[0]
        source = posixpath.normpath(posixpath.join(folder, path))
        uri = PAGES.get(source, re.sub(r"\.ipynb$", ".md", source.removeprefix("docs/")))
        if uri not in files.src_uris:
            return text
        shown = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{picture}[{text}]({shown}{hash_mark}{heading})"

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(followed, part) for part in parts[::2]]
    return "".join(parts)


def _shown(notebook: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook, and its pictures, by their names on the site."""
    page = []
    pictures: dict[str, str | bytes] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            page.append(source)
            continue
        magic, language = re.match(r"(%%(\w+).*\n)?", source).groups()
        source = source.removeprefix(magic or "")
        page.append(f"```{'sh' if language == 'bash' else 'python'}\n{source}\n```")
        for output in cell["outputs"]:
            if png := output.get("data", {}).get("image/png"):
                name = f"{notebook.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(png))
                page.append(f"![]({name})")
            else:
                page.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return {f"{notebook.stem}.md": "\n\n".join(page), **pictures}


def _signatures() -> Iterator[str]:
    yield SIGNATURES
    for page, (_, values) in pages().items():
        made = page != "api-world"  # a script makes these objects, and not a world
        for name, value in values.items():
            options = {"members": [], "merge_init_into_class": made}
            if isinstance(value, type):
                options["members"] = members(name, value)
            yield f"::: {value.__module__}.{name}\n    options: {json.dumps(options)}\n\n"
