"""The documentation says what is so: its programs run, its links lead somewhere, its lists are complete."""

from __future__ import annotations

import fnmatch
import importlib
import re
import runpy
import xml.etree.ElementTree as ET
from functools import reduce
from pathlib import Path

import pytest

import mxfp8_cutlass
from mxfp8_cutlass import env
from mxfp8_cutlass.generator.config_space import all_configs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The fragments that forges give a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_column(heading: str) -> str:
    """The first column of the table below a heading of README's."""
    section = README.split(f"\n{heading}\n")[1].split("\n#")[0]
    return "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))


def test_programs_run():
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    assert namespace["y"].shape == (600, 512)
    assert [tuple(y.shape) for y in namespace["ys"]] == [(300, 256), (17, 1024), (0, 64)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        assert destination.exists(), target
        if fragment:
            assert fragment in anchors(destination), target


def test_continuous_integration_runs_the_commands_of_the_readme():
    set_up, tests = blocks("sh")[:2]
    wanted = [part.strip() for part in f"{set_up}&&{tests}".split("&&")]
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in script if line in wanted] == wanted


def test_count_of_kernels_in_the_first_bundle():
    patterns = re.findall(r'--config "(.*?)"', blocks("sh")[0])
    names = {config.name for config in all_configs("90a")}
    assert f"compiles {sum(len(fnmatch.filter(names, pattern)) for pattern in patterns)} kernels" in README


def test_tables_of_the_readme_are_complete():
    functions = first_column("### Functions")
    assert [name for name in mxfp8_cutlass.__all__ if f"`{name}" not in functions] == []
    variables = first_column("### Environment variables")
    names = [env.CACHE_DIR, env.BUNDLE, env.JIT, env.CHECK]
    assert [name for name in names if f"`{name}`" not in variables] == []
    app = runpy.run_path(str(ROOT / "build.py"))["app"]
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert [name for name in commands if f"python build.py {name}" not in README] == []


def test_arrows_of_the_picture_are_functions():
    texts = [
        element
        for element in ET.parse(ROOT / "docs" / "data-flow.svg").iter("{http://www.w3.org/2000/svg}text")
        if "function" in element.get("class", "").split()
    ]
    assert len(texts) > 8
    for element in texts:
        module = importlib.import_module(element.get("data-module"))
        assert callable(reduce(getattr, element.text.split("."), module))


def test_every_variable_of_the_environment_is_known_here():
    """A new one in env.py has to be added to README's table and to the test above."""
    assert {name for name in vars(env) if name.isupper()} == {"CACHE_DIR", "BUNDLE", "JIT", "CHECK"}
