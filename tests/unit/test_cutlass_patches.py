"""Changes to CUTLASS's headers: each applies to the installed ones, and only sources that ask get them."""

from __future__ import annotations

import shutil

import pytest

from mxfp8_cutlass import cutlass_patches, headers
from mxfp8_cutlass.cutlass_patches import MARKER, PATCHES, PatchError, patched, patched_directory
from mxfp8_cutlass.headers import digest, include_path, toolchain
from mxfp8_cutlass.storage import InsecureDirectoryError

SOURCE = f"{MARKER}\n#include <cute/tensor.hpp>\n"
HEADERS = sorted({patch.header for patch in PATCHES})


@pytest.fixture
def copy(tmp_path):
    """The headers that are patched, where a test can change them."""
    for header in HEADERS:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(toolchain().cutlass / header, tmp_path / header)
    return tmp_path


def test_every_patch_applies_to_the_installed_headers():
    texts = patched(toolchain().cutlass)
    assert sorted(texts) == HEADERS
    for patch in PATCHES:
        assert patch.replacement in texts[patch.header]


def test_patches_say_why_and_quote_little():
    for patch in PATCHES:
        assert patch.why
        assert len(patch.anchor.splitlines()) <= 6
        assert patch.anchor != patch.replacement


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.header} {patch.why}"[:60])
def test_missing_anchor_is_an_error_that_names_header_and_version(copy, patch):
    path = copy / patch.header
    path.write_text(path.read_text().replace(patch.anchor, "// gone\n"))
    with pytest.raises(PatchError, match=rf"{patch.header} has the anchor .* 0 times(.|\n)*nvidia-cutlass==4\.2\.0\.0"):
        patched(copy)


def test_ambiguous_anchor_is_an_error(copy):
    patch = PATCHES[-1]
    path = copy / patch.header
    path.write_text(path.read_text() + patch.anchor)
    with pytest.raises(PatchError, match="2 times, not once"):
        patched(copy)


def test_missing_header_is_an_error(copy):
    (copy / HEADERS[0]).unlink()
    with pytest.raises(PatchError, match=f"cannot read .*{HEADERS[0]}"):
        patched(copy)


def test_only_a_source_that_asks_gets_patched_headers():
    assert include_path("#include <cute/tensor.hpp>\n") == include_path()
    path = include_path(SOURCE)
    assert [directory for directory in path if directory not in include_path()] == [path[1]]
    assert path[1] == patched_directory(toolchain().cutlass)
    assert sorted(str(file.relative_to(path[1])) for file in path[1].rglob("*") if file.is_file()) == HEADERS


def test_copies_are_written_once_and_mended(cache_dir):
    path = patched_directory(toolchain().cutlass) / HEADERS[0]
    before = path.stat().st_mtime_ns
    cutlass_patches._written.cache_clear()
    assert patched_directory(toolchain().cutlass) / HEADERS[0] == path
    assert path.stat().st_mtime_ns == before
    path.write_text("damaged")
    cutlass_patches._written.cache_clear()
    patched_directory(toolchain().cutlass)
    assert path.read_text() == patched(toolchain().cutlass)[HEADERS[0]]


def test_directory_is_named_after_its_content(copy, cache_dir):
    path = copy / HEADERS[0]
    first = patched_directory(copy)
    path.write_text(path.read_text() + "// changed\n")
    cutlass_patches._written.cache_clear()
    assert patched_directory(copy) != first


def test_cache_key_covers_patched_headers(cache_dir):
    assert digest(SOURCE, include_path(SOURCE)) != digest(SOURCE, include_path())
    before = digest(SOURCE, include_path(SOURCE))
    path = patched_directory(toolchain().cutlass) / "cute/container/tuple.hpp"
    path.write_text(path.read_text() + "// changed\n")
    headers._scan.cache_clear()
    assert digest(SOURCE, include_path(SOURCE)) != before
    headers._scan.cache_clear()


def test_directory_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MXFP8_CUTLASS_CACHE_DIR", str(tmp_path / "open"))
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InsecureDirectoryError):
        patched_directory(toolchain().cutlass)
