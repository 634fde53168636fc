"""The README and the pages in docs: links lead somewhere, promises name a test, code runs.

Nothing here judges words; what a page says of the code is for its reader to check.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.jail import Jail

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


def code_blocks(page: Path, language: str) -> Iterator[str]:
    for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == language:
            yield text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file that exists, and an anchor in it."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_code_compiles(page: Path) -> None:
    """Every Python block of a page is whole and right enough to compile."""
    for number, block in enumerate(code_blocks(page, "python")):
        compile(textwrap.dedent(block), f"{name_of(page)}, block {number}", "exec")


def test_every_promise_names_its_test() -> None:
    """Each row of the README's table of promises names tests that exist."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| promise | test |")[2]
    rows = ROW.findall(table.split("\n\n")[0])
    assert len(rows) > 5
    for row in rows:
        if set(row) <= set("-| "):
            continue
        tests = re.findall(r"`(tests/[^`]+)`", row.rpartition("|")[2])
        assert tests, f"no test is named: {row}"
        for named in tests:
            file, _, function = named.partition("::")
            path = ROOT / file
            assert path.exists(), f"{named} does not exist"
            if function:
                source = path.read_text(encoding="utf-8")
                assert f"def {function}(" in source, f"{named} does not exist"


def test_modules_that_the_pages_name_exist() -> None:
    """What looks like a path of the source tree in a page is one."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for named in re.findall(r"`((?:safepool|tests|examples|docs)/[\w./]+)`", text):
            assert (ROOT / named).exists(), f"{name_of(page)} names {named}"


def test_every_module_answers_a_question() -> None:
    """The architecture page names each module of the package, or its folder."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for module in (ROOT / "safepool").rglob("*.py"):
        if module.name.startswith("__"):
            continue
        assert f"`{name_of(module)}`" in text or f"`{name_of(module.parent)}/`" in text, (
            f"docs/architecture.md does not say what {name_of(module)} is for"
        )


def test_the_readme_code_runs(jail: Jail) -> None:
    """Each Python block of the README runs as a program of its own and leaves nothing."""
    for number, block in enumerate(code_blocks(ROOT / "README.md", "python")):
        program = jail.folder / f"readme_{number}.py"
        program.write_text(block)
        ran = jail.start([sys.executable, program])
        assert ran.wait() == 0, f"block {number}: {ran.errors()}"
        jail.assert_empty(f"after block {number}")
        assert "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]" in ran.errors()


def test_the_test_command_is_found_where_ci_looks() -> None:
    """The README has one test command of one line, and .ci/run reads it from there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"<!-- test command.*?-->\n```sh\n(.*?)\n```", readme)
    assert len(block) == 1
    words = shlex.split(block[0])
    assert words[:2] == ["python", "-m"]
    assert words[-4:-1] == ["-m", "pytest", "-n"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extract = re.findall(r"^command=\$\((.*)\)$", ci, re.MULTILINE)[0]
    ended = subprocess.run(
        ["bash", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == block[0]
