"""The documents agree with the code."""

from __future__ import annotations

import ast
import functools
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from docs.make_file_map import DOCUMENT, ROOT, updated
from tests.test_levels import LEVELS
from weft.cli import VERBS, build_parser
from weft.config.aliases import ALIASES
from weft.config.fields import OPTIONS
from weft.engine.llm import NOT_SUPPORTED
from weft.sampling_params import SamplingParams

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_file_map_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert updated(text) == text, "modules have changed: run `make docs`"


def test_level_table_is_the_tested_one() -> None:
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.*) \|$", architecture, re.MULTILINE)
    documented = [{room.rstrip("/") for room in re.findall(r"`([^`]+)`", rooms)} for _, rooms in rows]
    assert documented == [set(rooms) - {"__main__"} for rooms in LEVELS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_of_links_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text(encoding="utf-8")):
        titles = re.findall(r"^#+ (.*)$", (page.parent / target if target else page).read_text("utf-8"), re.MULTILINE)
        names = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        numbered = [f"{name}-{names[:i].count(name)}" if name in names[:i] else name for i, name in enumerate(names)]
        assert anchor in numbered, f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_documents_exist(page: Path) -> None:
    known = {"--" + name.replace("_", "-") for name in OPTIONS} | set(ALIASES) | {"--help", "--extra-index-url"}
    known |= {"--nproc-per-node", "--compile-bytecode"}  # of torchrun and uv
    known |= {flag for help_text in _help_texts() for flag in re.findall(r"--[a-z][a-z-]+", help_text)}
    text = re.sub(
        r"^(?:curl|docker|guidellm|lm_eval|ray|systemctl) (?:.*\\\n)*.*$", "", page.read_text("utf-8"), flags=re.M
    )
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert used <= known, f"{page.name} speaks of unknown flags"


@functools.cache
def _help_texts() -> list[str]:
    return [parser.format_help() for parser in (*_verbs().values(), *_benchmarks().values())]


def _verbs() -> dict[str, ArgumentParser]:
    return build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]


def _benchmarks() -> dict[str, ArgumentParser]:
    return _verbs()["bench"]._subparsers._group_actions[0].choices  # type: ignore[union-attr]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_attributes_in_documents_exist(page: Path) -> None:
    """``folder/file.py``, and ``Class.attribute`` of classes of Weft."""
    classes = _words_of_classes()
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)):
        if re.fullmatch(r"[\w/]+/\w+\.py", code):
            assert any((folder / code).exists() for folder in (ROOT, ROOT / "weft")), f"{page.name} names {code}"
        for name, attribute in re.findall(r"\b([A-Z]\w+)\.(\w+)", code):
            assert attribute in classes.get(name, {attribute}), f"{page.name} names {name}.{attribute}"


def _questions() -> list[tuple[str, str]]:
    """The table of questions in docs/architecture.md: question, and the cell that names code."""
    lines = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("| question | code | page |\n|---|---|---|\n")
    rows = [line.split(" | ") for line in lines[1].partition("\n\n")[0].splitlines()]
    return [(question.removeprefix("| "), code) for question, code, _ in rows]


@pytest.mark.parametrize(("question", "code"), _questions(), ids=lambda text: text[:40])
def test_the_table_of_questions_names_what_its_files_define(question: str, code: str) -> None:
    """Each name behind a file is defined there: ``Class.method``, or a name at any level. ``x`` follows ``Class.y``."""
    found = []
    for span in re.findall(r"`([^`]+)`", code):
        if span.endswith(("/", ".py")):
            assert (ROOT / "weft" / span).exists(), f"{question} {span} is no file"
            defined, owner = (_definitions(ROOT / "weft" / span) if span.endswith(".py") else None), ""
        elif defined is not None:
            owner, _, name = span.rpartition(".") if "." in span else (owner, "", span)
            assert {f"{owner}.{name}", name} & defined, f"{question} {span} is not defined in the file before it"
            found.append(span)
    assert found, f"{question} names no function"


def _definitions(path: Path) -> set[str]:
    """Functions, classes and constants of a module, and ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        found |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_the_page_of_graphs_lists_the_split_ops() -> None:
    listed = re.search(r"\n((?:`\w+`[, and\n]+)+)are split ops", (ROOT / "docs" / "cuda-graphs.md").read_text("utf-8"))
    sources = [path.read_text("utf-8") for path in sorted((ROOT / "weft" / "layers").glob("*.py"))]
    defined = {name for source in sources for name in re.findall(r'@split_op\("(\w+)"', source)}
    assert listed is not None and set(re.findall(r"`(\w+)`", listed[1])) == defined | {"all_reduce"}


@functools.cache
def _words_of_classes() -> dict[str, set[str]]:
    """The words in the code of each class of Weft, and in that of its bases, by the class's name."""
    classes: dict[str, set[str]] = {}
    bases: list[tuple[str, str]] = []
    for path in sorted((ROOT / "weft").rglob("*.py")):
        source = path.read_text("utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                words = re.findall(r"\w+", "\n".join(lines[node.lineno : node.end_lineno]))
                classes.setdefault(node.name, set()).update(words)
                bases += [(node.name, ast.unparse(base).rpartition(".")[2]) for base in node.bases]
    for _ in range(3):  # bases of bases
        for name, base in bases:
            classes[name] |= classes.get(base, set())
    return classes


def test_the_offline_page_names_every_parameter_and_refusal() -> None:
    text = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)", text))
    assert named >= {*SamplingParams.__struct_fields__, *NOT_SUPPORTED}


def test_every_verb_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    benchmarks = [f"bench {name}" for name in _benchmarks()]
    for name in (*(verb for verb in VERBS if verb != "bench"), *benchmarks):
        assert f"`weft {name}" in text
