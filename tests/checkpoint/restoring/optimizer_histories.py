"""Random histories of training jobs whose optimizers change between a save and the restore.

A job is a value: its layers in order of definition, the groups of its optimizers, wrappers, and so on. An operation
makes another job of it. A history trains a job, saves it, restores it into another job, trains on, and again. The state
after a restore is compared with plain dicts by parameter name, which are computed without dtckpt. Then both jobs train
on, the saved one and the restored one, and must stay equal.

The gradients are a function of a parameter's name, its values and the step, so a parameter's course depends on neither
the order nor the grouping. LBFGS is the exception.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dtckpt
from dtckpt import RestoreOptions, RestoreReport, SaveOptions
from dtckpt.errors import DtckptError

from .optimizer_jobs import CLASSES, SCHEDULERS, Group, History, Job, draw_stages

# --- running jobs ---


class _Wrapper(nn.Module):
    """A module in an attribute, as `torch.compile` and DistributedDataParallel keep it."""

    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        setattr(self, attribute, inner)


def _values(name: str, step: int, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(tuple(shape), generator=generator)


class Run:
    """A job that runs.

    Args:
        job: The job.
        salt: Another salt gives other first values.
    """

    def __init__(self, job: Job, salt: int) -> None:
        self.job = job
        net = nn.Module()
        for layer in job.layers:
            net.add_module(layer, nn.Linear(3, 3))
        for layer in job.tied[1:]:
            net.get_submodule(layer).weight = net.get_submodule(job.tied[0]).weight
        named = {job.canonical(name): each for name, each in net.named_parameters(remove_duplicate=False)}
        self.parameters: dict[str, nn.Parameter] = {name: named[name] for name in job.parameters()}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(_values(name, -1 - salt, parameter.shape))
        for layer in job.checkpointed:
            if layer in job.layers:
                setattr(net, layer, checkpoint_wrapper(net.get_submodule(layer)))
        self.model = net
        for wrapper in reversed(job.wrappers):
            self.model = _Wrapper({"compile": "_orig_mod", "module": "module"}[wrapper], self.model)
        self.optimizers = [self._optimizer(groups) for groups in job.optimizers]
        self.schedulers = [SCHEDULERS[job.scheduler](each) for each in self.optimizers] if job.scheduler else []
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}

    def _optimizer(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        kind, options = CLASSES[self.job.kind]
        full = {id(parameter): name for name, parameter in self.model.named_parameters()}

        def member(name: str) -> Any:
            parameter = self.parameters[name]
            own = {"model": full[id(parameter)], "layer": name.partition(".")[2]}
            return (own[names], parameter) if names != "no" else parameter

        # PyTorch wants a name once in a group.
        is_clear = all(len({name.partition(".")[2] for name in each.members}) == len(each.members) for each in groups)
        names = self.job.names if self.job.names != "layer" or is_clear else "no"

        made = [{"params": [*map(member, group.members)]} for group in groups]
        if self.job.kind != "LBFGS":
            made = [
                {**each, "lr": group.lr, "weight_decay": group.weight_decay}
                for each, group in zip(made, groups, strict=True)
            ]
        return kind(made, **options, **self.job.flags)

    def train(self, steps: Sequence[int], names: Callable[[int], int] = int) -> None:
        """Make some steps."""
        for step in steps:

            def gradients(step: int = step) -> float:
                for name, parameter in self.parameters.items():
                    parameter.grad = None
                    if name not in self.job.idle:
                        parameter.grad = _values(name, step, parameter.shape) + 0.1 * parameter.detach()
                return 1.0

            for optimizer in self.optimizers:
                gradients()
                optimizer.step(gradients)
            for scheduler in self.schedulers:
                args = (1.0 + step % 3,) if self.job.scheduler == "ReduceLROnPlateau" else ()
                scheduler.step(*args)

    def tree(self) -> dict[str, Any]:
        """Return what is saved and restored."""
        made: dict[str, Any] = {}
        for key in self.job.order:
            if key == "model" and self.job.tree != "nothing":
                made["model"] = self.model if self.job.tree == "module" else self.model.state_dict()
            elif key == "optimizer" and self.optimizers:
                made[key] = self._contained(self.optimizers)
            elif key == "scheduler" and self.schedulers:
                made[key] = self._contained(self.schedulers)
        return made

    def _contained(self, objects: Sequence[Any]) -> Any:
        if self.job.container == "one":
            return objects[0]
        return list(objects) if self.job.container == "list" else {f"o{at}": each for at, each in enumerate(objects)}

    def save(self, path: Path) -> None:
        """Save the job, with the keys of its groups that an older or a newer PyTorch has."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        lost = [group.pop(self.job.lost, None) for group in groups]
        for group in groups:
            group.update({"novel": 7} if self.job.extra else {})
        dtckpt.save(path, self.tree(), options=SaveOptions(overwrite=True))
        for group, value in zip(groups, lost, strict=True):
            group.pop("novel", None)
            if self.job.lost:
                group[self.job.lost] = value

    def snapshot(self) -> Snapshot:
        """Return copies of everything by name."""
        groups, of, state = [], {}, {}
        for place, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names[id(parameter)]
                    of[name] = len(groups)
                    if parameter in optimizer.state:
                        state[name] = {key: _copied(value) for key, value in optimizer.state[parameter].items()}
                options = {key: _copied(each) for key, each in group.items() if key not in ("params", "param_names")}
                groups.append((place, options))
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return Snapshot(weights, state, groups, of)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Args:
        weights: By name of the parameter.
        state: The state of each parameter that has some.
        groups: The place of its optimizer, and the options, of each group.
        of: The group of each parameter.
    """

    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, Any]]
    groups: list[tuple[int, dict[str, Any]]]
    of: dict[str, int]


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two values differ, bit for bit."""
    if isinstance(one, torch.Tensor):
        equal = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
        return [] if equal else [f"{path}: {one} is not {other}"]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [f"{path}/{key}: only in one" for key in one.keys() ^ other.keys()]
        return keys + [
            line for key in one.keys() & other.keys() for line in differences(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [
            line for at, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{path}/{at}")
        ]
    return [] if type(one) is type(other) and one == other else [f"{path}: {one!r} is not {other!r}"]


# --- expected restores ----------


@dataclass(frozen=True)
class Oracle:
    """What a restore of one job into another must give, by the names of the parameters."""

    saved: Job
    old: Snapshot
    target: Job
    own: Snapshot

    def found(self) -> list[str]:
        """Return the parameters of the target's optimizers whose state is saved."""
        return [name for name in self.target.trained() if name in self.old.of and name not in self._renamed()]

    def _renamed(self) -> set[str]:
        """Return the tied weight, if it is known by another one of its names and no module tells that both are one."""
        firsts = {next((layer for layer in job.layers if layer in job.tied), "") for job in (self.saved, self.target)}
        is_lost = self.target.tree == "nothing" and len(firsts) > 1
        return {f"{min(self.saved.tied)}.weight"} if is_lost else set()

    def missing(self) -> set[str]:
        """Return the parameters that the target asks for in vain."""
        model = {*self.target.parameters()} - {*self.saved.parameters()} if self.target.tree != "nothing" else set()
        if self.saved.tree == "nothing" and self.target.tree != "nothing":
            model = {"model"}
        # One key less is an older PyTorch's, one less and one more are another class's.
        lost = {self.saved.lost} if self.saved.lost and self.saved.extra and self.found() else set()
        homeless = {at for at in range(len(self.target.optimizers)) if not self.schedulers(at)}
        return (
            model
            | lost
            | ({*self.target.trained()} - {*self.found()})
            | {f"scheduler/{self._key(at)}" for at in homeless}
        )

    def unexpected(self) -> set[str]:
        """Return the parameters that were saved and that the target does not ask for."""
        model = {*self.saved.parameters()} - {*self.target.parameters()} if self.saved.tree != "nothing" else set()
        if self.target.tree == "nothing" and self.saved.tree != "nothing":
            model = {"model"}
        rest = self.old.of.keys() - {*self.found()}
        used = {self.old.of[name] for name in self.found()}
        # A group without a known member.
        lost = {"param_groups"} if {*range(len(self.old.groups))} - used else set()
        taken = {at for target in range(len(self.target.optimizers)) for at in self.schedulers(target)}
        unused = {f"scheduler/{self._key(at)}" for at in {*range(len(self.saved.optimizers))} - taken}
        return model | {name for name in rest if name in self.old.state} | lost | unused

    def schedulers(self, optimizer: int) -> set[int]:
        """Return the saved schedulers from which an optimizer's scheduler takes its state."""
        numbers = [number for number, (place, _) in enumerate(self.own.groups) if place == optimizer]
        sources = {self.old.groups[source][0] for number in numbers if (source := self.source(number)) is not None}
        own = {optimizer} & {*range(len(self.saved.optimizers))}
        return (sources | own) if self.target.scheduler else {*range(len(self.saved.optimizers))}

    def _key(self, at: int) -> str:
        return f"o{at}" if self.target.container == "dict" else str(at)

    def refusals(self) -> list[tuple[str, set[str]]]:
        """Return the errors that may come, each with the names of which one must be in its text."""
        if self.target.kind == "LBFGS" and self.saved.trained() != self.target.trained():
            return [("", {*self.saved.trained(), *self.target.trained(), "LBFGS"})]
        if not self.target.is_lenient and self.missing():
            return [("TensorNotFoundError", self.missing())]
        if not self.target.is_lenient and self.unexpected():
            return [("UnexpectedTensorError", self.unexpected())]
        return []

    def is_optional(self) -> bool:
        """Whether a refusal may fail to come: only options of a group that is no more were saved in vain."""
        return self.unexpected() <= {"param_groups"} and (self.target.is_lenient or not self.missing())

    def expected(self) -> Snapshot:
        """Return the target after the restore."""
        found = self.found()
        state = {name: each for name, each in self.own.state.items() if name not in found}
        state |= {name: self.old.state[name] for name in self.found() if name in self.old.state}
        groups = []
        for number, (place, own) in enumerate(self.own.groups):
            source = self.source(number)
            saved = self._saved_options(source) if source is not None else {}
            groups.append((place, {**own, **saved}))
        weights = dict(self.own.weights)
        if self.target.tree != "nothing" and self.saved.tree != "nothing":
            weights |= {name: value for name, value in self.old.weights.items() if name in weights}
        return Snapshot(weights, state, groups, self.own.of)

    def source(self, number: int) -> int | None:
        """Return the saved group that most members of a group of the target had; the first of those equally many."""
        members = [name for name, group in self.own.of.items() if group == number and name in self.found()]
        counts = Counter(self.old.of[name] for name in members)
        return counts.most_common(1)[0][0] if counts else None

    def _saved_options(self, group: int) -> dict[str, Any]:
        options = {key: value for key, value in self.old.groups[group][1].items() if key != self.saved.lost}
        return {**options, "novel": 7} if self.saved.extra else options

    def steady(self) -> set[str]:
        """Return the parameters whose course goes on as before: their group has their options and states."""
        if self.target.tree == "nothing" or self.saved.tree == "nothing":
            return set()
        of_group: dict[int, set[int | None]] = {}
        for name, group in self.own.of.items():
            of_group.setdefault(group, set()).add(self.old.of.get(name))
        return {name for name in self.found() if len(of_group[self.own.of[name]] - {None}) == 1}


def run(history: History, folder: Path) -> list[str]:
    """Run a history in this process; return the faults."""
    first, *others = history.jobs()
    now, step = Run(first, salt=0), 0
    now.train(range(3))
    step = 3
    for number, job in enumerate(others, 1):
        now.save(folder / f"{history.seed}")
        target = Run(job, salt=number)
        if job.is_stepped:
            target.train([100, 101])
        wrong = _restore(now, target, folder / f"{history.seed}")
        if wrong is None:
            return []
        if wrong:
            return [f"restore {number}: {line}" for line in wrong]
        target.job = job
        oracle_steady = target.steady  # type: ignore[attr-defined]
        steps = range(step, step + 2)
        now.job = replace(now.job, idle=job.idle)
        now.train(steps)
        try:
            target.train(steps)
        except (KeyError, RuntimeError) as error:
            return [f"restore {number}: the next step fails: {error!r}"]
        for name in sorted(oracle_steady):
            wrong += differences(now.parameters[name].detach(), target.parameters[name].detach(), f"course of {name}")
        if wrong:
            return [f"restore {number}: {line}" for line in wrong]
        now, step = target, step + 2
    return []


def _restore(now: Run, target: Run, path: Path) -> list[str] | None:
    """Restore a job into another one; return the faults, or None if there is rightly nothing to go on with."""
    saved, own = now.snapshot(), target.snapshot()
    oracle = Oracle(now.job, saved, target.job, own)
    target.steady = oracle.steady()  # type: ignore[attr-defined]
    refusals = oracle.refusals()
    reports: list[RestoreReport] = []
    for is_lenient in (target.job.is_lenient, True):
        options = RestoreOptions(allow_missing=is_lenient, allow_unexpected=is_lenient, report=reports.append)
        try:
            dtckpt.restore(path, target.tree(), options=options)
            break
        except DtckptError as error:
            text = f"{type(error).__name__}: {error}"
            text = text.replace(f"{max(now.job.tied)}.weight", f"{min(now.job.tied)}.weight") if now.job.tied else text
            if not any(kind in text and any(name in text for name in names) for kind, names in refusals):
                return [f"refused with {text}; expected {refusals or 'none'}"]
            if changes := _compare(own, target.snapshot()):
                return [f"a refused restore changed {line}" for line in changes]
            if is_lenient:
                return None
            refusals = replace(oracle, target=replace(target.job, is_lenient=True)).refusals()
    else:
        refusals = []
    if refusals and not oracle.is_optional():
        return [f"not refused; expected {refusals}"]
    wrong = _compare(oracle.expected(), target.snapshot())
    wrong += [f"{part} was found by {rule}" for part, rule in reports[-1].owners.items() if rule == "position"]
    return wrong


# --- pipelines, in client processes ---


def stage_of(job: Job, number: int, stages: int) -> Job:
    """Return the part of a job that one stage of a pipeline has."""
    count = len(job.layers)
    layers = job.layers[count * number // stages : count * (number + 1) // stages]
    checkpointed = tuple(layer for layer in job.checkpointed if layer in layers)
    return replace(job, layers=layers, checkpointed=checkpointed).settled()


def save_stages(folder: str, seeds: Sequence[int]) -> list[str]:
    """Train and save the first jobs of histories, each client its stage; return the errors."""
    found = []
    for seed in seeds:
        first, _ = draw_stages(seed).jobs()
        run = Run(stage_of(first, dtckpt.client_id(), dtckpt.num_clients()), salt=0)
        run.train(range(3))
        try:
            dtckpt.save(f"{folder}/{seed}", run.tree(), options=SaveOptions(timeout_s=20))
            found.append("")
        except DtckptError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def restore_stages(folder: str, seeds: Sequence[int]) -> list[tuple[str, Snapshot, Snapshot]]:
    """Restore what `save_stages` saved into the second jobs; return errors, snapshots, and later ones."""
    found = []
    for seed in seeds:
        _, job = draw_stages(seed).jobs()
        run, error = Run(stage_of(job, dtckpt.client_id(), dtckpt.num_clients()), salt=1), ""
        if job.is_stepped:
            run.train([100, 101])
        options = RestoreOptions(allow_missing=job.is_lenient, allow_unexpected=job.is_lenient, timeout_s=20)
        try:
            dtckpt.restore(f"{folder}/{seed}", run.tree(), options=options, group=range(dtckpt.num_clients()))
        except DtckptError as refusal:
            error = f"{type(refusal).__name__}: {refusal}"
        then = run.snapshot()
        if not error:
            run.train(range(3, 5))
        found.append((error, then, run.snapshot()))
    return found


def wrong_in_stages(seed: int, answers: Sequence[tuple[str, Snapshot, Snapshot]]) -> list[str]:
    """Return the faults in the answers of `restore_stages` of all clients for one history."""
    first, job = draw_stages(seed).jobs()
    whole = Run(first, salt=0)
    whole.train(range(3))
    old = whole.snapshot()
    whole.job = replace(first, idle=job.idle)
    whole.train(range(3, 5))
    target = Run(job, salt=1)
    if job.is_stepped:
        target.train([100, 101])
    oracle = Oracle(first, old, job, target.snapshot())
    errors = {error for error, _, _ in answers}
    if len(errors) > 1:
        return [f"clients raise different errors: {sorted(errors)}"]
    (error,) = errors
    refusals = oracle.refusals()
    if error:
        is_right = any(kind in error and any(name in error for name in names) for kind, names in refusals)
        return [] if is_right else [f"refused with {error}; expected {refusals or 'none'}"]
    if refusals and not oracle.is_optional():
        return [f"not refused; expected {refusals}"]
    wrong = []
    for client, (_, then, later) in enumerate(answers):
        stage = stage_of(job, client, len(answers))
        own = Run(stage, salt=1)
        if job.is_stepped:
            own.train([100, 101])
        of_stage = Oracle(first, old, stage, own.snapshot())
        expected = of_stage.expected()
        wrong += differences(expected.weights, then.weights, f"weights of client {client}")
        wrong += differences(expected.state, then.state, f"state of client {client}")
        for name in sorted(of_stage.steady()):
            wrong += differences(whole.parameters[name].detach(), later.weights[name], f"course of {name}")
        for name in of_stage.found():
            members = [each for each, group in then.of.items() if group == then.of[name] and each in old.of]
            choices = [old.groups[old.of[each]][1] for each in members]
            options = then.groups[then.of[name]][1]
            if all(differences(each, options) for each in choices):
                wrong.append(f"options of {name}: {options} are none of {choices}")
    return wrong


def _compare(expected: Snapshot, got: Snapshot) -> list[str]:
    return [
        *differences(expected.weights, got.weights, "weights"),
        *differences(expected.state, got.state, "state"),
        *differences([each for _, each in expected.groups], [each for _, each in got.groups], "groups"),
    ]


def shrunk(history: History, is_wrong: Callable[[History], bool]) -> History:
    """Return the smallest history found that is still wrong."""
    for _ in range(20):
        smaller = next((each for each in history.smaller() if is_wrong(each)), None)
        if smaller is None:
            break
        history = smaller
    return history
