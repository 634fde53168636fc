"""Count the words in a folder of text files with a pool, one file a task.

    python examples/word_counts.py [FOLDER]

Without a folder it makes one in the temporary directory, out of the documentation that
comes with Python's own modules, and removes it at the end. The workers run a closure,
which plain pickle cannot carry.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from safepool import SafePool

MODULES = ("argparse", "decimal", "difflib", "doctest", "email", "json", "logging", "unittest")


def word_counter(shortest: int) -> Callable[[Path], Counter[str]]:
    """Make the function that the workers run: count words of ``shortest`` letters or more."""
    word = re.compile(rf"[^\W\d_]{{{shortest},}}")

    def count(path: Path) -> Counter[str]:
        return Counter(word.findall(path.read_text(encoding="utf-8", errors="replace").lower()))

    return count


def make_texts(folder: Path) -> None:
    """Write one text file for each module: what its docstrings say."""
    for name in MODULES:
        module = importlib.import_module(name)
        things = [module, *(thing for _, thing in sorted(vars(module).items()))]
        documented = [thing for thing in things if inspect.isclass(thing) or thing is module]
        text = "\n\n".join(inspect.getdoc(thing) or "" for thing in documented)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def count_folder(folder: Path) -> None:
    """Print how many words the folder's text files hold, and the most frequent."""
    paths = sorted(folder.rglob("*.txt"))
    if not paths:
        sys.exit(f"no *.txt file in {folder}")
    total: Counter[str] = Counter()
    with SafePool() as pool:
        for counts in pool.imap_unordered(word_counter(shortest=6), paths):
            total.update(counts)
    print(f"{total.total()} long words, {len(total)} different ones, in {len(paths)} files")
    for word, n in sorted(total.items(), key=lambda item: (-item[1], item[0]))[:10]:
        print(f"{n:7} {word}")


def main() -> None:
    if len(sys.argv) > 1:
        count_folder(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory(prefix="word-counts-") as folder:
        make_texts(Path(folder))
        count_folder(Path(folder))


if __name__ == "__main__":
    main()
