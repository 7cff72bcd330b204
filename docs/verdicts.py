"""Writes docs/verdicts-*.md: the verdict on each rule of TASO's own files, which lie in the folder that is given.

    python docs/verdicts.py FOLDER

The files themselves are TASO's and no part of this project.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from taso import cli

FILES = ("graph_subst.pb", "generated_depth3.pb")
DOCS = Path(__file__).parent


def main(folder: Path) -> int:
    """Writes a page for each file; the status is that of what cannot be done, not that of the rules."""
    for name in FILES:
        page = io.StringIO()
        with contextlib.redirect_stdout(page):
            cli.main(["rules", "verify", str(folder / name), "--markdown"])
        if not page.getvalue():
            return 1
        (DOCS / f"verdicts-{Path(name).stem}.md").write_text(page.getvalue(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/verdicts.py FOLDER")
    sys.exit(main(Path(sys.argv[1])))
