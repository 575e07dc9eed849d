# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/: the examples run, the figures are the measured ones, the links lead somewhere."""

import json
import re
import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402

README = (ROOT / "README.md").read_text()
PAGES = [
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "sdm_kernels")
    for path in sorted((ROOT / folder).glob("*.md"))
]


def anchors(text):
    """The names that the headings of a page have as link targets."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.kernels_ci
def test_examples_run(sdm):
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert len(blocks) >= 8
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["sdm"] is sdm


def test_every_public_name_is_shown(sdm):
    for name in sdm.__all__:
        assert re.search(rf"`(sdm\.)?{name}\b", README), name


def test_figures_are_the_measured_ones():
    report = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    table = README.partition("<!-- cpu -->\n")[2].partition("\n<!-- /cpu -->")[0]
    assert table == tables.brief_table(report)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target
