"""A hook of MkDocs: the site has the folders of the repository, so that one link between pages is right there and on a git host."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.*", "benchmarks/*.md", "agentgym_envs/**/*.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        files.append(File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, False))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """A link to source, which the site does not have, becomes the name of the file."""
    folder = PurePosixPath(page.file.src_uri).parent

    def name_source(link: re.Match[str]) -> str:
        target = normpath(folder / link[2])
        if files.get_file_from_path(target) or not (ROOT / target).exists():
            return link[0]
        return f"{link[1]} (`{target}`)"

    return LINK.sub(name_source, markdown)
