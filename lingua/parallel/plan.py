"""The layout of a plain module on the mesh, by patterns of names, and the check that it fits."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import chain

from torch import nn
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)

from lingua.base.errors import UserError, nearest
from lingua.parallel.init import canonical_name


@dataclass(frozen=True)
class ParallelPlan:
    """The layout of a plain module on the mesh. Names are patterns of module names, in which `*`
    matches one part; each must match something.

    blocks: the repeated layers. Each is checkpointed, compiled and an FSDP unit of its own.
    compiled: modules outside the blocks that are compiled where blocks are, by their own `compile`.
    units: further FSDP units, each a group of modules whose parameters are gathered together; the
        last is the end of the model.
    tp: the style of each module under tensor parallelism, of several that match it the last; None
        when the model has no such layout.
    tp_equal: modules or parameters that no style distributes and that every tp rank holds whole.
        Their gradients must be equal on all tp ranks: what enters and leaves such a module is equal
        there. A norm whose input is split over positions needs the style SequenceParallel instead.
    tp_divides: sizes that tp must divide, by the name of their config key.
    """

    blocks: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    tp: dict[str, ParallelStyle] | None = None
    tp_equal: tuple[str, ...] = ()
    tp_divides: dict[str, int] = field(default_factory=dict)

    def with_part(
        self, part: str, tp: Mapping[str, ParallelStyle | None], tp_equal: tuple[str, ...] = ()
    ) -> "ParallelPlan":
        """The plan of a model whose modules `part` are of another kind. `tp` has styles by patterns
        of names inside the part ("" is the part itself), None where a module has none any more; the
        plan's own stay where they match none of these."""
        new = {f"{part}.{name}".rstrip("."): style for name, style in tp.items()}
        replaced = {*new, *matching(self.tp or (), list(new))}
        styles = {n: style for n, style in (self.tp or {}).items() if n not in replaced}
        styles |= {n: style for n, style in new.items() if style is not None}
        equal = (*self.tp_equal, *(f"{part}.{name}" for name in tp_equal))
        return replace(self, tp=styles, tp_equal=equal)


# Styles that convert inputs and outputs, and distribute no parameters.
_INPUT_OUTPUT_STYLES = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)


def check_layout(model: nn.Module, plan: ParallelPlan | None, tp: int, cp: int = 1) -> None:
    """Check that a plan fits a plain model, which may be on the meta device, `tp` ranks, and `cp`
    that divide positions.

    It needs no processes. A style that is not torch's own is trusted to distribute the parameters
    of its modules; `parallelize_model` looks at what it did. Raises UserError, which names
    everything that is wrong.
    """
    plan = plan or ParallelPlan()
    modules, parameters = list(modules_of(model)), list(parameters_of(model))
    problems = [
        f"ParallelPlan.{where}: no {kind} of the model is named {pattern}{nearest(pattern, names)}"
        for where, patterns, kind, names in (
            ("blocks", plan.blocks, "module", modules),
            ("compiled", plan.compiled, "module", modules),
            ("units", chain(*plan.units), "module", modules),
            ("tp", plan.tp or (), "module", modules),
            ("tp_equal", plan.tp_equal, "module or parameter", modules + parameters),
        )
        for pattern in patterns
        if not matching(names, [pattern])
    ]
    problems += _tied_across_units(model, plan)
    if tp > 1 and plan.tp is None:
        problems.append(
            f"distributed.tp_size = {tp}: this model gives no tensor-parallel layout; set it to 1"
        )
    elif tp > 1:
        uneven = [f"{key} = {size}" for key, size in plan.tp_divides.items() if size % tp]
        if uneven:
            problems.append(f"distributed.tp_size = {tp}: must divide {', '.join(uneven)}")
        styles = (plan.tp or {}).items()
        from lingua.parallel.styles import unclear

        problems += unclear({name: s for name, s in styles if within(name, plan.blocks)})
        styled = [name for name, style in styles if type(style) not in _INPUT_OUTPUT_STYLES]
        problems += undeclared([name for name in parameters if not within(name, styled)], plan, tp)
    if cp > 1:
        from lingua.parallel.context_parallel import undivided

        problems += undivided(modules_of(model), tp, cp)
    if problems:
        raise UserError("\n".join(problems))


def _tied_across_units(model: nn.Module, plan: ParallelPlan) -> Iterator[str]:
    """A line for each parameter that modules of several FSDP units share. torch refuses these; up
    to 2.12 it left a part of them without updates where shards are uneven (its issue 176076)."""
    blocks = matching(modules_of(model), plan.blocks)
    units = [*([block] for block in blocks), *plan.units]
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in modules_of(model).items():
        for key, p in module.named_parameters(recurse=False):
            owners.setdefault(p, []).append(f"{name}.{key}".lstrip("."))
    for names in owners.values():
        if len({next((i for i, u in enumerate(units) if within(n, u)), -1) for n in names}) > 1:
            yield (
                f"ParallelPlan.units: {' and '.join(names)} are one parameter in several FSDP "
                "units; name their modules in the same unit, or in none"
            )


def within(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches this module or parameter, or a module that contains it."""
    parts = name.split(".")
    return bool(matching([".".join(parts[:n]) for n in range(len(parts) + 1)], list(patterns)))


def matching(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    return [name for name in names if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    if not name or name.count(".") != pattern.count("."):
        return name == pattern  # "" is the model itself, which `*` does not match
    return fnmatch(name, pattern)


def undeclared(whole: list[str], plan: ParallelPlan, tp: int) -> list[str]:
    """A line that names the `whole` parameters, those that no style distributes, that `tp_equal`
    leaves out; no line where it has them all."""
    names = [name for name in whole if not within(name, plan.tp_equal)]
    if not names:
        return []
    return [
        f"distributed.tp_size = {tp}: the model's plan does not define how tensor-parallel ranks "
        f"hold {', '.join(names)}. Give each of their modules a style in ParallelPlan.tp "
        "(SequenceParallel for a norm whose input is split over positions); where the gradient is "
        "equal on all these ranks, name it in ParallelPlan.tp_equal"
    ]


def blocks_of(model: nn.Module, plan: ParallelPlan) -> list[nn.Module]:
    """The repeated layers of a model, in order."""
    modules = modules_of(model)
    return [modules[name] for name in matching(modules, plan.blocks)]


def find_modules(model: nn.Module, patterns: Collection[str]) -> dict[str, nn.Module]:
    """The modules of these patterns (see ParallelPlan), by their names in the plain model. Raises
    UserError where a pattern matches none."""
    modules = modules_of(model)
    for pattern in patterns:
        if not matching(modules, [pattern]):
            known = nearest(pattern, modules)
            raise UserError(f"no module of the model is named {pattern}{known}")
    return {name: modules[name] for name in matching(modules, patterns)}


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the name they have in the plain model; a wrapper stands for what it wraps."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(canonical_name(f"{name}.")[:-1], module)
    return modules


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {canonical_name(name): p for name, p in model.named_parameters()}
