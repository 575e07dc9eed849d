# SPDX-License-Identifier: Apache-2.0
"""The examples of the docstrings run, and the docstrings say what the style page asks for."""

import doctest

import pytest
import torch

FUNCTIONS = (
    "chunk_sdm", "chunk_sdm_", "recurrent_sdm_", "check_indices", "chunk_kda",
    "fused_recurrent_kda", "recurrent_kda_",
)  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(sdm, name):
    function = getattr(sdm, name)
    globs = {"torch": torch, **{other: getattr(sdm, other) for other in FUNCTIONS}}
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    # check_indices is wrapped to stay out of graphs; its docstring is that of the inner function
    text = getattr(function, "_torchdynamo_orig_callable", function)
    tests = finder.find(text, name, globs=globs)
    assert any(test.examples for test in tests)
    for test in tests:
        runner.run(test)
    assert runner.summarize().failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections(sdm, name):
    text = getattr(sdm, name).__doc__
    words = ["Args:", "Returns:", "Effects:", "Support:", "Raises:", "Example:"]
    if name != "check_indices":
        words += ["Gradients:", "Determinism:", "autocast"]
    for word in words:
        assert word.lower() in text.lower(), word
