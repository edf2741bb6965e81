"""Run all cases of the sweep and write docs/coverage.md: `make sweep-page`."""

from __future__ import annotations

from coverage_table import PAGE, page
from optimizer_cases import SECTION as OPTIMIZERS

SECTIONS = [OPTIMIZERS]

if __name__ == "__main__":
    PAGE.write_text(page([(section, {key: section.run(key) for key in section.cases}) for section in SECTIONS]))
