"""The house keeps its order: which room may import which, and what the documents point to."""

import ast
import re
from pathlib import Path

import pytest
from test_mistakes import MISTAKES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ict"

# From docs/design.md: a room may import the rooms before it. The door may call anyone.
ROOMS = [
    "reading", "config", "recipes", "files", "download", "device", "pixels", "precision", "ranks", "rng", "noise",
    "solvers", "mixture", "curriculum", "weighting", "lpips", "distance", "nets", "start", "model", "recording",
    "objectives", "data", "training", "runfolder", "sampling", "pictures", "display", "editing", "evaluation",
    "experiment", "cost", "bench", "info", "studies", "interop", "serve",
]  # fmt: skip
DOOR = {"__init__", "__main__", "frontpage", "cli", "cli_data", "cli_judge"}
MODULES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ict":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("ict.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_import_points_down(path):
    if room(path) in DOOR:
        return
    mine = ROOMS.index(room(path))
    for other in imported_rooms(path):
        assert other in ROOMS and ROOMS.index(other) <= mine, f"{room(path)} imports {other}"


def test_the_design_page_lists_the_same_rooms_in_the_same_order():
    page = (ROOT / "docs" / "design.md").read_text()
    listed = [word for word in re.findall(r"^      (\w+)(?:\.py|/)", page, re.MULTILINE) if word in ROOMS]
    assert listed == ROOMS


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_is_for(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert node.returns is not None, f"{node.name} has no return type"


def test_the_paper_map_points_to_what_exists():
    page = (ROOT / "docs" / "paper-map.md").read_text()
    functions = re.findall(r"`(?!tests/)(\w+(?:/\w+)*\.py):(\w+)`", page)
    tests = re.findall(r"`(tests/[\w/]+\.py):(\w+)`", page)
    assert len(functions) >= 15 and len(tests) >= 15
    for file, name in functions:
        assert re.search(rf"^\s*(def|class) {name}\b", (SOURCE / file).read_text(), re.MULTILINE), f"{file}:{name}"
    for file, name in tests:
        assert re.search(rf"^def {name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file}:{name}"


def test_documents_link_to_files_that_exist():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_mistakes_that_are_made_on_purpose_can_still_be_made():
    """They are made by `make test-slow`; that a line has changed should be known at once."""
    stale = [
        mistake for mistake, (file, right, *_) in MISTAKES.items() if right not in (ROOT / "src/ict" / file).read_text()
    ]
    assert not stale
