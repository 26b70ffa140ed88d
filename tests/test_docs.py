"""The documentation: every page is reachable, and what is generated is up to date."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {"reference/config.md", "reference/commands.md", "changelog.md"}


@pytest.fixture
def draw() -> ModuleType:
    """The script that draws the pictures."""
    path = DOCS / "pictures" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_that_the_script_draws(draw: ModuleType) -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("pictures/*.svg")}
    assert files == {name: picture() for name, picture in draw.PICTURES.items()}


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r": (\S+\.md)$", navigation, flags=re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(named) == sorted(pages | GENERATED)


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) >= 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_files_that_the_pages_name_exist() -> None:
    """Pages with an errand name files of the package without its folder."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    missing = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|yaml|sh|sbatch|md))`", page.read_text())
        if not any((ROOT / folder / name).exists() for folder in ("", "olmo_shard"))
    }
    assert missing == {("extending.md", "dispatch/NAME.py"), ("extending.md", "optim/NAME.py")}
