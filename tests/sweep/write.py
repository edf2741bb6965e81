"""Run the cases of the sweep and write docs/coverage.md: `make sweep-page`.

Titles of sections as arguments: the other ones keep their rows.
"""

from __future__ import annotations

import sys

from coverage_table import PAGE, page
from module_cases import SECTION as MODULES
from optimizer_cases import SECTION as OPTIMIZERS

SECTIONS = [OPTIMIZERS, MODULES]

if __name__ == "__main__":
    wanted = sys.argv[1:] or [section.title for section in SECTIONS]
    PAGE.write_text(
        page(
            [
                (
                    section,
                    {key: section.run(key) for key in section.cases} if section.title in wanted else section.rows(),
                )
                for section in SECTIONS
            ]
        )
    )
