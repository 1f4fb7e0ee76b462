"""docs/conformance.md lists the laws as they are."""

from __future__ import annotations

import re
from pathlib import Path

from kvframe.testing import check_stage
from kvframe.testing.broken.scorers import BatchMaximum
from kvframe.testing.checks import LAWS
from kvframe.testing.table import TITLES, law_tables

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


def masked(text: str) -> str:
    return re.sub(r"\d+\.\d+(e-?\d+)?", "#", text)


def test_the_page_has_the_laws():
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index("### Every stage")
    assert text[begin:].strip() == law_tables().strip(), "print it anew with: python -m kvframe.testing.table"
    assert set(TITLES) == set(LAWS)


def test_the_failure_on_the_page_is_a_real_one():
    (message,) = [result.message for result in check_stage(BatchMaximum()) if not result.passed]
    # Figures may differ in the last digit from machine to machine.
    assert masked(message) in masked(PAGE.read_text(encoding="utf-8"))
