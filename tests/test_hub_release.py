# SPDX-License-Identifier: Apache-2.0
"""What a release consists of besides the builds: card, workflows, flake, pinned dependencies."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import torch
import yaml
from packaging.requirements import Requirement

from . import conftest
from .conftest import REPO_ID, ROOT

sys.path.insert(0, str(ROOT / "tools"))

from devbuild import config as build_config  # noqa: E402
from devbuild import toolchain  # noqa: E402

CONFIG = build_config.load(ROOT)
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


def tracked(pattern):
    """The files of the repository that match, tracked or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


# ---- the card ------------------------------------------------------------------------------------


def layer_names():
    tree = ast.parse((CONFIG.package_dir / "layers.py").read_text())
    return [
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    ]


@pytest.fixture(scope="module")
def card(sdm):
    """The card as the builder fills it in."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=False)
    return environment.from_string((ROOT / "CARD.md").read_text()).render(
        repo_id=CONFIG.repo_id,
        version=CONFIG.version,
        license=CONFIG.license,
        functions=[name for name in sdm.__all__ if name != "layers"],
        layers=layer_names(),
        has_benchmark=(ROOT / "benchmarks" / "benchmark.py").exists(),
        upstream=None,
    )


def test_card_has_the_real_values(card, sdm):
    assert "{{" not in card and "{%" not in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "kernels" and front["license"] == "apache-2.0"
    for name in sdm.__all__:
        assert f"`{name}`" in card or name == "layers"
    for name in layer_names():
        assert f"- `layers.{name}`\n" in card
    assert f"kernels benchmark {REPO_ID} --version 1" in card


def test_example_of_the_card_runs(card):
    names = {}
    (block,) = re.findall(r"^```python\n(.*?)^```$", card, re.M | re.S)
    exec(compile(block, "CARD.md", "exec"), names)
    assert names["y"].shape == (2, 512, 256) and names["out"].shape == (2, 512, 4, 64)


def listed_cards(text):
    """Compute capabilities in the order of a text."""
    return re.findall(r"\b(\d+\.\d)\b", text)


def test_cards_are_those_of_the_build(card):
    (base,) = (s.cuda_capabilities for s in CONFIG.sections if s.name == "cuda_base")
    rows = dict(re.findall(r"^\| cuda (\S+)(?:, \S+)? \| (.*?) \|", card, re.M))
    known = {version: toolchain.Cuda(Path("cuda"), version) for version in ("12.6", "12.8")}
    old = [arch for arch in base if known["12.6"].knows(arch)]
    assert listed_cards(rows["12.6"]) == old
    new = rows["12.8,"] if "12.8," in rows else rows["12.8"]
    assert listed_cards(new) == [arch for arch in base if arch not in old]
    readme = (ROOT / "README.md").read_text()
    (sentence,) = re.findall(r"compiled for compute capability (.*?), tried", readme)
    assert listed_cards(sentence) == list(base)


def test_changelog_names_what_is_public(sdm):
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## Version {CONFIG.version}" in text
    for name in sdm.__all__:
        assert re.search(rf"`{name}\b", text), name


# ---- workflows and flake --------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_pinned_and_modest(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
        if "secrets." in str(job):
            assert name == "upload"
        # An expression in a shell line is text that others may choose.
        for step in job["steps"]:
            for expression in re.findall(r"\$\{\{(.*?)\}\}", step.get("run", "")):
                assert expression.strip().startswith("matrix."), expression


def test_release_builds_what_build_toml_lists():
    jobs = RELEASE["jobs"]
    for job in ("build", "upload"):
        assert jobs[job]["strategy"]["matrix"]["backend"] == list(CONFIG.backends)
    builds = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    for command in ("check-config", "backendBundle", "check-abi", "check-builds"):
        assert command in builds
    lowest, highest = jobs["test-cpu"]["strategy"]["matrix"]["torch"]
    assert lowest.startswith(CONFIG.stable_abi["cpu"] + ".")
    assert CONFIG.stable_abi["cpu"] == CONFIG.stable_abi["cuda"]
    assert f"torch=={highest}\n" in (ROOT / "requirements.txt").read_text()


def test_nothing_is_uploaded_untested():
    upload = RELEASE["jobs"]["upload"]
    assert set(upload["needs"]) == {"build", "test-cpu", "test-cuda"}
    assert "inputs.upload" in upload["if"] and upload["environment"] == "hub"
    commands = [step.get("run", "") for step in upload["steps"]]
    signing = next(i for i, run in enumerate(commands) if "cosign sign-blob" in run)
    sending = next(i for i, run in enumerate(commands) if "-- upload" in run)
    assert signing < sending


def test_files_that_workflows_call_exist():
    for path in WORKFLOWS:
        for name in re.findall(
            r"(?:tools/\w+\.py|\.ci/run|requirements\S*\.txt)", path.read_text()
        ):
            assert (ROOT / name).exists(), name


def test_commands_in_the_docs_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    seen = set()
    for page in pages:
        text = page.read_text()
        pieces = re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", text, re.M | re.S)
        code = "\n".join(block or inline for block, inline in pieces)
        for target in re.findall(r"^make ((?:[a-z][\w-]* ?)+)", code, re.M):
            seen.update(target.split())
        for name in re.findall(r"\b((?:tools|benchmarks|examples|tests)/[\w/]+\.py)\b", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
    assert {"test", "lint", "variants", "demo"} <= seen <= targets, seen - targets


def test_flake_gives_the_builders_outputs():
    text = (ROOT / "flake.nix").read_text()
    assert 'kernel-builder.url = "github:huggingface/kernels";' in text
    assert "kernel-builder.lib.genKernelFlakeOutputs" in text
    assert "inherit self;" in text and "path = ./.;" in text
    assert text.count("{") == text.count("}") and text.count("[") == text.count("]")


def test_build_is_found_in_the_builders_test_shell(tmp_path, monkeypatch, sdm):
    # There the variant is on the path under the package's name, and there is no build/.
    variant = Path(sdm.__file__).parent
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    assert conftest.kernel_path() == tmp_path
    monkeypatch.syspath_prepend(str(variant))
    assert conftest.kernel_path() == variant.resolve()


def test_a_run_is_recorded(tmp_path):
    out = tmp_path / "run.json"
    command = [sys.executable, str(ROOT / "tools" / "record_run.py"), "--out", str(out), "--"]
    command += ["-p", "no:xdist", "tests/test_variants.py", "-k", "matrix_is_complete or metadata"]
    environment = {k: v for k, v in os.environ.items() if k != "SDM_VARIANTS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["outcomes"]["passed"] >= 1 and record["outcomes"]["skipped"] == 1
    assert record["failed"] == []
    assert record["skipped"] == {"make variants builds the matrix": 1}
    assert record["machine"]["torch"] == torch.__version__
    assert record["variant"]["id"].startswith("_sparse_delta_memory_")
    assert " -k matrix_is_complete or metadata" in record["command"]


# ---- supply chain -----------------------------------------------------------------------------------


def requirement_lines(path):
    for line in path.read_text().splitlines():
        line = line.split("#")[0].strip()
        if line and not line.startswith("-"):
            yield line


PINNED = {
    requirement.name.lower().replace("_", "-"): requirement
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt")
    for requirement in map(Requirement, requirement_lines(ROOT / name))
}


@pytest.mark.parametrize(
    "name", ["constraints.txt", *sorted(path.name for path in ROOT.glob("requirements*.txt"))]
)
def test_requirements_have_exact_versions(name):
    lines = list(requirement_lines(ROOT / name))
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[\w.+-]+", line), line


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tools/toolkits").glob("*.txt")), ids=lambda p: p.name
)
def test_toolkits_have_hashes(path):
    lines = list(requirement_lines(path))
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line), line


def test_what_the_requirements_pull_in_is_pinned():
    for name in ("kernels", "ruff"):
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        if str(PINNED[name].specifier) != f"=={installed}":
            pytest.skip("not the environment of requirements-dev.txt")
    # What torch pulls in for CUDA it asks for by exact version itself.
    by_torch = re.compile(r"nvidia-|cuda-|triton")
    waiting, seen = ["torch", "kernels", *PINNED], set()
    while waiting:
        name = waiting.pop()
        if name in seen or by_torch.match(name):
            continue
        seen.add(name)
        assert name in PINNED, f"{name} is pulled in and not pinned"
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name.lower().replace("_", "-"))
    assert {"kernels", "torch", "huggingface-hub", "pytest"} <= seen


def test_nothing_unpickles():
    words = ["pick" + "le", "torch.lo" + "ad(", "mar" + "shal", "she" + "lve", "job" + "lib"]
    for path in tracked("*.py"):
        text = path.read_text()
        for word in words:
            if path != Path(__file__).resolve():
                assert word not in text, f"{path.name}: {word}"


def test_tests_use_no_network():
    with pytest.raises(PermissionError, match="a test connects to 192.0.2.1"):
        socket.create_connection(("192.0.2.1", 80), timeout=5)


def test_package_starts_and_opens_nothing():
    banned = {"subprocess", "socket", "urllib", "http", "ctypes", "tempfile", "shutil"}
    for path in CONFIG.python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif not isinstance(node, ast.Import):
                continue
            assert not banned & {name.split(".")[0] for name in names}, path.name


def test_library_calls_no_file_or_socket(sdm):
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    (library,) = Path(sdm.__file__).parent.glob("*.so")
    command = ["nm", "-D", "--undefined-only", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {line.split()[-1].split("@")[0] for line in text.splitlines()}
    assert "memcpy" in used
    assert not used & {
        "open",
        "open64",
        "fopen",
        "fopen64",
        "socket",
        "connect",
        "dlopen",
        "system",
    }
    assert not used & {"execve", "execvp", "fork", "popen", "setenv", "putenv"}
