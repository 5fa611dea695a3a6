"""An experiment as one value, and how programs find it.

An app is a module or package that has an `App` as its attribute `app`. Every program (training,
evaluation, generation, conversion, launching) works from that value, so a fork that changes the
model needs no program of its own.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lingua.base.errors import UserError, nearest
from lingua.config.values import COMMAND_LINE, Values, parse_argument, read_files

if TYPE_CHECKING:  # finding an app imports no torch
    from torch import nn

    from lingua.parallel.plan import ParallelPlan

APPS = Path(__file__).parents[1] / "apps"  # apps of this repository
GROUP = "lingua.apps"  # entry points of installed packages: name = "package.module:app"
MAIN = "main"  # the app of a config that names none


@dataclass(frozen=True)
class Built:
    """The model of a config."""

    module: "nn.Module"  # a lingua.model.LanguageModel on the meta device, unless it is small
    plan: "ParallelPlan | None"  # its layout on a mesh; None: data parallel as one unit
    flops_per_token: float  # forward and backward, for the MFU
    # its tensors that every start reads from `checkpoint.init_from` and no checkpoint has: frozen
    base: frozenset[str] = frozenset()


@dataclass(frozen=True)
class App:
    """The parts of an experiment. A part that is None is that of apps.main."""

    path: str  # import path of the module that has this value as `app`; config.yaml records it
    config: type  # dataclass of the whole configuration: apps.main.config.TrainArgs or derived
    build: Callable[[Any], Built]  # the model of such a configuration
    data: Any = None  # where rows come from, a lingua.data.rows.Data
    # (sharded module, configuration, plan) -> torch.optim.Optimizer
    optimizer: "Callable[[nn.Module, Any, ParallelPlan | None], Any] | None" = None
    # (Run) -> apps.main.train.Objective, which computes gradients and held-out loss
    objective: Callable[[Any], Any] | None = None
    probe: Callable[[Any], None] | None = None  # (Run), after the gradients of each step
    # () -> lingua.tools.exchange.hugging_face.HuggingFace, imported where one is read or written
    hugging_face: Callable[[], Any] | None = None
    merges_into: "App | None" = None  # the app whose models these are, with low-rank changes


def choose_app(argv: list[str], files: list[Values] | None = None) -> App:
    """The app that a command line asks for, apps/main where it asks for none. Raises UserError."""
    return named_app(argv, files) or find_app(None, "")


def named_app(argv: list[str], files: list[Values] | None = None) -> App | None:
    """The app that a command line names: `app=MODULE`, else `app:` in its `config=FILE`, whose
    `files` a caller may have read. Raises UserError: it cannot be imported, or a file names one
    that find_app does not trust."""
    named = [word.removeprefix("app=") for word in argv if word.startswith("app=")]
    if named:
        path = parse_argument(named[-1]).value
        return find_app(None, "") if path is None else import_app(str(path), COMMAND_LINE)
    for layer in reversed(read_files(argv) if files is None else files):
        if "app" in layer and layer["app"].value is not None:
            return find_app(str(layer["app"].value), layer["app"].where)
    return None


def find_app(path: str | None, where: str) -> App:
    """The app that a file names at the place `where`; None: apps/main. Importing executes code, so
    only the apps of this repository and those that installed packages register are imported."""
    trusted = known_apps()
    path = trusted.get(MAIN) if path is None else str(path)  # a file may have a number
    if path is None:
        raise UserError("app: must be given here as app=MODULE; this installation has no app main")
    folder = path.rpartition(".")[0] if path.startswith(f"{APPS.name}.") else None
    if not {path, folder} & {*trusted.values()}:  # an app, or another module of an app here
        names = ", ".join(sorted(trusted.values())) or "none"
        raise UserError(
            f"app = {path} ({where}): is not imported because a file names it. To trust it, give "
            f"app={path} on the command line; known apps: {names}{nearest(path, trusted.values())}"
        )
    return import_app(path, where)


def main_program(name: str = "train") -> str:
    """The module of a program of apps/main: `train`, which has the loop, trains any app."""
    main = known_apps().get(MAIN)
    if main is None:
        raise UserError(
            f"this installation has no app main, whose program is {name}; to lingua stool another "
            "is given as script=MODULE"
        )
    return f"{main}.{name}"


def known_apps() -> dict[str, str]:
    """{name: import path} of this repository's apps/ and of entry points, apps/ first."""
    paths = {point.name: point.module for point in entry_points(group=GROUP)}
    package = APPS.name
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    if [Path(place).resolve() for place in places] == [APPS.resolve()]:  # not another `apps`
        modules = [f for f in APPS.glob("*/__init__.py") if f.stat().st_size]  # some define no app
        paths |= {f.parent.name: f"{package}.{f.parent.name}" for f in modules}
    return paths


def import_app(path: str, where: str) -> App:
    """The App of a module. Raises UserError where there is none."""
    try:
        app = getattr(import_named(path, f"app = {path} ({where})"), "app", None)
    except UserError as error:
        known = known_apps().values()
        hint = "" if path in known else nearest(path, known)
        raise UserError(f"{error}{hint}") from None
    if not isinstance(app, App):
        raise UserError(f"app = {path} ({where}): the module has no lingua.app.App named app")
    return app


def import_named(path: str, named_by: str) -> ModuleType:
    """The module of a dotted path. Raises UserError, which begins with `named_by`."""
    if not all(name.isidentifier() for name in path.split(".")):
        raise UserError(f"{named_by}: must be the dotted path of a module, such as apps.main")
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise UserError(f"{named_by}: cannot be imported ({error})") from None
