"""Rendering: pure, strict, and the same for every config."""

from __future__ import annotations

import re

import axpy_kernel
import jinja2
import pytest
from axpy_kernel import AxpyConfig

from mxfp8_cutlass.generator import render as module
from mxfp8_cutlass.generator.config_space import all_configs
from mxfp8_cutlass.generator.render import render
from mxfp8_cutlass.templates import INCLUDE, TEMPLATES

TARGETS = ["90a", "100a"]


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Writes AxpyConfig's template."""
    monkeypatch.setattr(module, "TEMPLATES", tmp_path)
    yield lambda text: axpy_kernel.write_template(tmp_path, text)
    module._environment.cache_clear()


@pytest.mark.parametrize("target_sm", TARGETS)
def test_every_config_renders_to_one_entry_of_its_name(target_sm):
    for config in all_configs(target_sm):
        source = render(config)
        assert source == render(config)
        assert re.findall(r'extern "C"', source) == ['extern "C"']
        assert re.search(rf"\b{config.name}\(const __grid_constant__ [\w:]+ \w+\)", source), config
        assert "{{" not in source
        assert "{%" not in source


@pytest.mark.parametrize("target_sm", TARGETS)
def test_names_are_unique_identifiers(target_sm):
    configs = all_configs(target_sm)
    names = {config.name for config in configs}
    assert len(names) == len(configs) == len(set(configs))
    assert all(re.fullmatch(r"sm(90|100)_\w+", name, re.ASCII) for name in names)
    assert all(config.target_sm == target_sm for config in configs)


def test_undefined_variable_is_an_error(template):
    template("{{ config.nonsense }}")
    with pytest.raises(jinja2.UndefinedError, match="nonsense"):
        render(AxpyConfig())


def test_config_is_the_only_variable(template):
    template("{{ threads }}")
    with pytest.raises(jinja2.UndefinedError, match="threads"):
        render(AxpyConfig())


def test_invalid_config_is_refused_with_the_reason(template):
    template("")
    with pytest.raises(ValueError, match=r"axpy_2048x0.*a block has at most 1024"):
        render(AxpyConfig(threads=2048))


def test_includes_are_literal():
    """The headers' digest follows includes by their names, so none may be computed by a macro."""
    for path in [*INCLUDE.rglob("*.cuh"), *TEMPLATES.glob("*.j2")]:
        for line in re.findall(r"^\s*#\s*include\s.*", path.read_text(), re.MULTILINE):
            assert re.match(r'\s*#\s*include\s+[<"]', line), f"{path.name}: {line}"
