"""How an app is found, and which names are trusted."""

import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

from apps.main import app as main_app
from apps.mtp import app as mtp_app
from lingua.app import choose_app, find_app, known_apps, named_app
from tests.mistakes import refused

ROOT = Path(__file__).resolve().parents[1]
FORK = """
from dataclasses import replace
from pathlib import Path
from apps.main import app
Path(__file__).with_name("executed").touch()
app = replace(app, path=__name__)
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the search path with a module that leaves a trace when it is executed."""
    (tmp_path / "strangers_app.py").write_text(FORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "strangers_app", raising=False)
    return tmp_path


def test_the_command_line_names_any_app_and_a_file_only_those_of_the_repository(stranger):
    assert choose_app(["app=apps.mtp"]) is mtp_app
    assert choose_app(["steps=3"]) is main_app
    assert named_app(["steps=3"]) is None
    config = stranger / "config.yaml"
    config.write_text("name: a\napp: apps.mtp\n")
    assert choose_app([f"config={config}"]) is mtp_app
    config.write_text("name: a\napp: strangers_app\n")
    refused(lambda: choose_app([f"config={config}"]), "config.yaml:2", "not imported")
    assert not (stranger / "executed").exists()
    assert choose_app([f"config={config}", "app=strangers_app"]).path == "strangers_app"
    assert (stranger / "executed").exists()  # and the trace shows what is executed
    # Or one that an installed package registers.
    info = stranger / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lingua.apps]\nmine = strangers_app:app\n")
    assert known_apps()["mine"] == "strangers_app"
    assert find_app("strangers_app", "config.yaml").path == "strangers_app"


def test_another_package_called_apps_is_not_trusted(tmp_path):
    (tmp_path / "apps" / "main").mkdir(parents=True)
    for module in ("apps/__init__.py", "apps/main/__init__.py"):
        (tmp_path / module).write_text("raise SystemExit('executed')\n")
    code = "from lingua.app import known_apps; print(known_apps())"
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.stdout.strip() == "{}", done.stderr


def test_the_wheel_holds_the_library_alone():
    packages = find_packages(str(ROOT), include=["lingua*"])
    assert {"lingua", "lingua.tools.prepare", "lingua.config"} <= set(packages)
    assert 'include = ["lingua*"]' in (ROOT / "pyproject.toml").read_text()
