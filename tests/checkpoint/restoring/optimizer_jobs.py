"""Jobs whose optimizers change, and random histories of them; see `optimizer_histories`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import lr_scheduler

LAYERS = "abcdefgh"
RATES = (0.1, 0.05, 0.02)
DECAYS = (0.0, 0.1)
CLASSES = {
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "LBFGS": (torch.optim.LBFGS, {"history_size": 3, "max_iter": 2}),
}
FLAGS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3, 6], gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [2 * group["lr"] for group in optimizer.param_groups], total_steps=60, cycle_momentum=False
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer,
        [group["lr"] / 2 for group in optimizer.param_groups],
        [group["lr"] * 2 for group in optimizer.param_groups],
        step_size_up=3,
        cycle_momentum=False,
    ),
}


@dataclass(frozen=True)
class Group:
    """A group of parameters."""

    members: tuple[str, ...]
    lr: float = 0.1
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Job:
    """What a training script says.

    Args:
        layers: In the order of definition.
        tied: Two layers with one weight; none if empty.
        optimizers: The groups of each optimizer.
        container: What the tree has its optimizers in: ``one``, ``list`` or ``dict``.
        kind: A key of `CLASSES`.
        flags: Further arguments of the optimizers.
        scheduler: A key of `SCHEDULERS`; none if empty.
        wrappers: Around the model, the outermost first: ``compile``, ``module``.
        checkpointed: Layers in a wrapper for activation checkpointing.
        idle: Parameters that get no gradient.
        names: What names the optimizers get: ``no``, ``model`` or ``layer``.
        tree: What the tree has of the model: ``module``, ``state_dict`` or ``nothing``.
        order: The keys of the tree.
        lost: A key that the groups lack when they are saved; none if empty.
        extra: Whether the groups have one key more when they are saved.
        is_stepped: Whether the job makes some steps before it is restored.
        is_lenient: Whether the restore may leave things out.
    """

    layers: tuple[str, ...]
    optimizers: tuple[tuple[Group, ...], ...]
    tied: tuple[str, ...] = ()
    container: str = "one"
    kind: str = "AdamW"
    flags: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str = ""
    wrappers: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    names: str = "no"
    tree: str = "module"
    order: tuple[str, ...] = ("model", "optimizer", "scheduler")
    lost: str = ""
    extra: bool = False
    is_stepped: bool = False
    is_lenient: bool = True

    def canonical(self, name: str) -> str:
        """Return the one name that tied parameters have here."""
        return f"{min(self.tied)}.weight" if name in [f"{each}.weight" for each in self.tied] else name

    def parameters(self) -> list[str]:
        """Return the names of the parameters; tied ones have one."""
        both = (f"{layer}.{end}" for layer in self.layers for end in ("weight", "bias"))
        return [*dict.fromkeys(map(self.canonical, both))]

    def trained(self) -> list[str]:
        return [name for groups in self.optimizers for group in groups for name in group.members]

    def settled(self) -> Job:
        """Return the job without members of groups that it does not have, and without empty optimizers."""
        own = {*self.parameters()}
        optimizers = (
            tuple(
                replace(each, members=kept) for each in groups if (kept := tuple(m for m in each.members if m in own))
            )
            for groups in self.optimizers
        )
        return replace(self, optimizers=tuple(groups for groups in optimizers if groups))


# --- operations ---


def _reorder_layers(job: Job, rng: random.Random) -> Job:
    return replace(job, layers=tuple(rng.sample(job.layers, len(job.layers))))


def _reorder_members(job: Job, rng: random.Random) -> Job:
    def shuffled(group: Group) -> Group:
        return replace(group, members=tuple(rng.sample(group.members, len(group.members))))

    return replace(job, optimizers=tuple(tuple(map(shuffled, groups)) for groups in job.optimizers))


def _reorder_groups(job: Job, rng: random.Random) -> Job:
    return replace(job, optimizers=tuple(tuple(rng.sample(groups, len(groups))) for groups in job.optimizers))


def _reorder_optimizers(job: Job, rng: random.Random) -> Job:
    return replace(job, optimizers=tuple(rng.sample(job.optimizers, len(job.optimizers))))


def _swap_members(job: Job, rng: random.Random) -> Job:
    """Swap members of groups, which keep their sizes."""
    mixed = iter(rng.sample(job.trained(), len(job.trained())))
    optimizers = (
        tuple(replace(group, members=tuple(next(mixed) for _ in group.members)) for group in groups)
        for groups in job.optimizers
    )
    return replace(job, optimizers=tuple(optimizers))


def _regroup(job: Job, rng: random.Random) -> Job:
    """Divide the parameters anew among as many optimizers."""
    names = rng.sample(job.trained(), len(job.trained()))
    return replace(job, optimizers=_divided(names, len(job.optimizers), job.kind, rng))


def _other_number(job: Job, rng: random.Random) -> Job:
    """Divide the parameters anew among another number of optimizers."""
    if job.container == "one":
        return job
    return replace(job, optimizers=_divided(job.trained(), rng.randint(1, 4), job.kind, rng))


def _divided(names: Sequence[str], count: int, kind: str, rng: random.Random) -> tuple[tuple[Group, ...], ...]:
    cuts = sorted(rng.sample(range(1, len(names)), min(count, len(names)) - 1))
    parts = [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    return tuple(_groups(part, kind, rng) for part in parts)


def _groups(names: Sequence[str], kind: str, rng: random.Random) -> tuple[Group, ...]:
    if kind == "LBFGS":
        return (Group(tuple(names)),)
    cuts = sorted(rng.sample(range(1, len(names)), min(rng.randint(0, 2), len(names) - 1)))
    parts = [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    return tuple(Group(tuple(part), rng.choice(RATES), rng.choice(DECAYS)) for part in parts)


def _wrap(job: Job, rng: random.Random) -> Job:
    wrappers = rng.choice([(), ("compile",), ("module",), ("compile", "module"), ("module", "compile")])
    checkpointed = tuple(layer for layer in job.layers if rng.random() < 0.3)
    return replace(job, wrappers=wrappers, checkpointed=checkpointed)


def _freeze(job: Job, rng: random.Random) -> Job:
    return replace(job, idle=tuple(name for name in job.trained() if rng.random() < 0.3))


def _leave_out(job: Job, rng: random.Random) -> Job:
    """Take a parameter out of its group."""
    out = rng.choice(job.trained())
    optimizers = tuple(
        tuple(replace(group, members=tuple(m for m in group.members if m != out)) for group in groups)
        for groups in job.optimizers
    )
    return replace(job, optimizers=optimizers) if len(job.trained()) > 1 else job


def _take_in(job: Job, rng: random.Random) -> Job:
    """Train what is in no group yet."""
    rest = [name for name in job.parameters() if name not in job.trained()]
    if not rest:
        return job
    first, *others = job.optimizers
    first = (replace(first[0], members=(rng.choice(rest), *first[0].members)), *first[1:])
    return replace(job, optimizers=(first, *others))


def _add_layer(job: Job, rng: random.Random) -> Job:
    new = [layer for layer in LAYERS if layer not in job.layers]
    if not new:
        return job
    layers = list(job.layers)
    layers.insert(rng.randint(0, len(layers)), new[0])
    return _take_in(_take_in(replace(job, layers=tuple(layers)), rng), rng)


def _remove_layer(job: Job, rng: random.Random) -> Job:
    free = [layer for layer in job.layers if layer not in job.tied]
    gone = rng.choice(free) if len(free) > 1 else ""
    return replace(job, layers=tuple(layer for layer in job.layers if layer != gone))


def _change_flags(job: Job, rng: random.Random) -> Job:
    return replace(job, flags=_flags(job.kind, rng))


def _flags(kind: str, rng: random.Random) -> Mapping[str, Any]:
    if kind == "LBFGS":
        return {}
    # PyTorch's fused SGD takes no parameter without a momentum beside parameters that have one.
    return rng.choice([each for each in FLAGS if kind not in ("Adafactor", "SGD") or "fused" not in each])


def _change_names(job: Job, rng: random.Random) -> Job:
    return replace(job, names=rng.choice(["no", "model", "layer"]))


def _change_tree(job: Job, rng: random.Random) -> Job:
    order = tuple(rng.sample(job.order, len(job.order)))
    tree = rng.choice(["module", "module", "state_dict", "nothing"])
    return replace(job, order=order, tree=tree)


def _change_keys(job: Job, rng: random.Random) -> Job:
    lost = rng.choice(["", "differentiable", "maximize"]) if job.kind not in ("LBFGS", "Adafactor") else ""
    return replace(job, lost=lost, extra=rng.random() < 0.3)


OPERATIONS: tuple[Callable[[Job, random.Random], Job], ...] = (
    _reorder_layers,
    _reorder_members,
    _reorder_groups,
    _reorder_optimizers,
    _swap_members,
    _regroup,
    _other_number,
    _wrap,
    _freeze,
    _leave_out,
    _take_in,
    _add_layer,
    _remove_layer,
    _change_flags,
    _change_names,
    _change_tree,
    _change_keys,
)


@dataclass(frozen=True)
class History:
    """A first job, and for each restore the operations that make its job from the job before it."""

    seed: int
    first: Job
    steps: tuple[tuple[tuple[int, int], ...], ...]

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs."""
        yield (job := self.first)
        for operations in self.steps:
            for number, seed in operations:
                job = OPERATIONS[number](job, random.Random(seed)).settled()
            rng = random.Random(f"{self.seed} {operations}")
            # Without the module only the optimizers' own names are left.
            if job.tree == "nothing" and job.names != "model":
                job = replace(job, names="model")
            yield (job := replace(job, is_stepped=rng.random() < 0.5, is_lenient=rng.random() < 0.7))

    def __str__(self) -> str:
        first, *others = self.jobs()
        names = [", ".join(OPERATIONS[number].__name__.strip("_") for number, _ in step) for step in self.steps]
        lines = [f"{{{step}}}\n  -> {job}" for step, job in zip(names, others, strict=True)]
        return "\n".join([f"DTCKPT_HISTORY_SEED={self.seed}", f"  {first}", *lines])

    def smaller(self) -> Iterator[History]:
        """Yield histories with one operation or one restore less."""
        for at, step in enumerate(self.steps):
            if len(self.steps) > 1:
                yield replace(self, steps=(*self.steps[:at], *self.steps[at + 1 :]))
            for number in range(len(step)):
                fewer = (*step[:number], *step[number + 1 :])
                yield replace(self, steps=(*self.steps[:at], fewer, *self.steps[at + 1 :]))


def draw(seed: int) -> History:
    """Return a random history."""
    rng = random.Random(seed)
    layers = tuple(rng.sample(LAYERS, rng.randint(2, 4)))
    kind = rng.choice([*CLASSES, "AdamW", "Adam", "SGD"])
    container = "one" if kind == "LBFGS" else rng.choice(["one", "one", "list", "dict"])
    job = Job(
        layers,
        (),
        tied=tuple(rng.sample(layers, 2)) if rng.random() < 0.25 else (),
        container=container,
        kind=kind,
        flags=_flags(kind, rng),
        scheduler="" if kind == "LBFGS" else rng.choice(["", *SCHEDULERS]),
        names=rng.choice(["no", "no", "model"]),
    )
    count = 1 if container == "one" else rng.randint(1, 3)
    job = replace(job, optimizers=_divided(job.parameters(), count, kind, rng))
    steps = [
        tuple((rng.randrange(len(OPERATIONS)), rng.randrange(1 << 20)) for _ in range(rng.randint(1, 3)))
        for _ in range(2)
    ]
    return History(seed, _freeze(job, rng) if rng.random() < 0.3 else job, tuple(steps))


def draw_stages(seed: int) -> History:
    """Return a random history of a pipeline, whose saves and restores have any number of stages."""
    rng = random.Random(f"stages {seed}")
    layers = tuple(rng.sample(LAYERS, rng.randint(4, 6)))
    kind = rng.choice(["AdamW", "Adam", "SGD", "Adagrad"])
    job = Job(layers, (), container=rng.choice(["one", "one", "list"]), kind=kind, flags=_flags(kind, rng))
    job = replace(job, optimizers=_divided(job.parameters(), 1 if job.container == "one" else 2, kind, rng))
    # A plain tensor of several stages is one tensor, so the model is always there.
    numbers = [at for at, each in enumerate(OPERATIONS) if each not in (_change_tree, _change_keys)]
    step = tuple((rng.choice(numbers), rng.randrange(1 << 20)) for _ in range(rng.randint(1, 3)))
    return History(seed, _freeze(job, rng) if rng.random() < 0.3 else job, (step,))
