"""The examples of docs/python.md, and of the README's part about it, do what they say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from peers import ROOT, clean_environment, OURS

PAGE = ROOT / "docs" / "python.md"


def blocks(text: str) -> list[tuple[int, str]]:
    """Where each example begins that is to be run, and the example."""
    found = re.finditer(r"(<!-- not run[^\n]*\n)?```python\n(.*?)```", text, re.S)
    return [(text.count("\n", 0, block.start(2)), block[2]) for block in found if not block[1]]


def test_the_examples_of_the_guide_run():
    text = PAGE.read_text()
    examples = blocks(text)
    assert len(examples) >= 12
    names: dict = {"__name__": "examples"}
    for line, code in examples:
        exec(compile("\n" * line + code, str(PAGE), "exec"), names)


def test_the_guide_has_every_class_of_error_and_every_setting():
    import inspect

    import tensorferry

    text = PAGE.read_text()
    for name in tensorferry.__all__:
        assert f"`{name}`" in text or f"{name}(" in text or name in ("Buffer", "Segment", "__version__", "doctor"), name
    settings = set(re.findall(r"`TENSORFERRY_([A-Z_]+)`", (ROOT / "docs" / "settings.md").read_text()))
    # Where libraries lie is a matter of the machine, and the last one of the program.
    settings = {name.lower() for name in settings if not name.endswith("_LIBRARY")} - {"simulator"}
    assert settings == set(list(inspect.signature(tensorferry.Engine).parameters)[1:])


@pytest.fixture
def programs(tmp_path):
    text = (ROOT / "README.md").read_text()
    part = text[text.index("## From Python") : text.index("## In place of")]
    first = [code for _, code in blocks(part)][:2]
    for name, code in zip(("target.py", "initiator.py"), first, strict=True):
        (tmp_path / name).write_text(code)
    return tmp_path


def test_the_programs_of_the_readme_run(programs):
    arguments = dict(cwd=programs, env=clean_environment(OURS), text=True, stderr=subprocess.STDOUT)
    target = subprocess.Popen([sys.executable, "target.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **arguments)
    try:
        line = target.stdout.readline()
        name = line.split()[-1]
        assert line.startswith("now run: python initiator.py 127.0.0.1:"), line
        said = subprocess.run([sys.executable, "initiator.py", name], stdout=subprocess.PIPE, timeout=60, **arguments)
        assert said.returncode == 0 and "hello over plain TCP" in said.stdout, said.stdout
        rest, _ = target.communicate("\n", timeout=60)
        assert target.returncode == 0 and "hello over plain TCP" in rest, rest
    finally:
        target.kill()
        target.wait()
