"""The documents as tests read them: code blocks, commands, links, and tables that are generated."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from paperlm.plan.project import ROOT

DOCUMENTS = ["README.md", "kernels/README.md", "kernels/MEASURED.md", "kernels/MEASURED_FEW_BITS.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))


@dataclass(frozen=True)
class Block:
    """A fenced block. `file`: the path that the line before it names as `path`:"""

    document: str
    language: str
    text: str
    file: str = ""


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str = "") -> list[Block]:
    """Its blocks in order, all or those in one language."""
    pattern = r"(?:^`([\w./-]+)`:\n\n)?^```(\w*)\n(.*?)^```$"
    found = re.findall(pattern, read(document), re.MULTILINE | re.DOTALL)
    return [Block(document, kind, text, file) for file, kind, text in found if not language or kind == language]


def prose(document: str) -> str:
    """The document without its blocks."""
    return re.sub(r"^```.*?^```$", "", read(document), flags=re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[str]:
    """Each command line of its shell blocks, comments cut off."""
    text = "\n".join(block.text for block in blocks(document, "sh")).replace("\\\n", " ")
    return [command for line in text.splitlines() if (command := re.sub(r"\s+#.*$", "", line).strip())]


def words(command: str) -> list[str]:
    return shlex.split(command)


def headings(document: str) -> set[str]:
    """Anchors of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def generated(document: str, mark: str) -> str:
    """What stands between `<!-- mark -->` and the next `<!-- end -->`."""
    return read(document).split(f"<!-- {mark} -->")[1].split("<!-- end -->")[0].strip()
