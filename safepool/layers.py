"""The layers of protection: what each is called, what it promises and what it needs.

One list for ``pool.protection``, which says what protects a run at this moment, and for
``safepool doctor``, which says what this machine and this user could have. Decides; what
is missing is for the caller to find out.

Called by: the run, the doctor.
"""

from __future__ import annotations

from collections.abc import Mapping

from safepool.core.values import dataclass


@dataclass(frozen=True)
class Layer:
    """One layer. ``needs`` are mechanisms, by the doctor's names; ``is_extra``: every
    promise holds without it."""

    name: str
    promise: str
    needs: tuple[str, ...] = ()
    is_extra: bool = False


@dataclass(frozen=True)
class LayerState:
    """Whether a layer holds, and why not ("" if it does)."""

    layer: Layer
    holds: bool
    reason: str = ""

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer.name


LAYERS = (
    Layer(
        "launcher",
        "the whole tree of a worker ends with it and with the owner, whatever it did to get away",
        ("pidfd", "subreaper", "proc"),
    ),
    Layer(
        "deathsig",
        "workers die with their launcher, even if everything else was killed in that instant",
        ("deathsig",),
    ),
    Layer(
        "sidecar",
        "the owner's death is seen by a second process, which ends what a killed launcher left",
        ("pidfd", "interpreter", "proc"),
    ),
    Layer(
        "lifeline",
        "a worker that waits for its parent_process() sees the owner's death by itself",
        ("pidfd",),
    ),
    Layer(
        "tag",
        "what lost parent, session and environment is still known, also which worker it is of",
        ("tag",),
    ),
    Layer(
        "mark",
        "what was exec'd is known by its environment, through all runs that it lies within",
        ("environ",),
    ),
    Layer(
        "registry",
        "what is left when all of these were killed at once is ended by the next start, or by "
        "`safepool sweep`",
        ("registry", "lock", "boot"),
    ),
    Layer(
        "cgroup",
        "the kernel itself holds a run's processes together, and ends them in one step",
        ("cgroup",),
        is_extra=True,
    ),
)
"""In the order in which they act."""


WITHOUT_THE_KERNEL = {
    "launcher": "the portable backend ends what it has seen in some look, or finds by its mark",
    "deathsig": "the portable backend has a thread in each worker instead",
    "tag": "the portable backend has none",
    "cgroup": "the portable backend uses none",
}
"""What does not hold with the portable backend, and why."""


def states(missing: Mapping[str, str]) -> tuple[LayerState, ...]:
    """The state of every layer; ``missing`` has the reason for each that does not hold."""
    unknown = missing.keys() - {layer.name for layer in LAYERS}
    if unknown:
        raise ValueError(f"no such layer: {', '.join(sorted(unknown))}")
    return tuple(
        LayerState(layer, layer.name not in missing, missing.get(layer.name, ""))
        for layer in LAYERS
    )


@dataclass(frozen=True)
class Protection:
    """What protects a run at this moment.

    ``sidecar``, ``launcher``: these processes watch the owner. ``tag``: workers can carry
    it. ``cgroup``: they live in a cgroup v2 of the run's own. ``reason``: why something
    is missing, "" when nothing is; the cgroup never counts, since nothing depends on it.
    ``backend``: "linux", or "portable", which promises less (see docs/architecture.md).
    """

    sidecar: bool
    launcher: bool
    reason: str = ""
    tag: bool = True
    cgroup: bool = False
    backend: str = "linux"

    @property
    def layers(self) -> tuple[LayerState, ...]:
        """Each layer by the name that ``safepool doctor`` has for it, and whether it holds."""
        missing = {} if self.cgroup else {"cgroup": "the run has none"}
        if not self.sidecar:
            missing["sidecar"] = self.reason or "it is just starting"
        if not self.launcher:
            why = self.reason or "there is none"
            missing |= {"launcher": why, "deathsig": why}
        if not self.tag:
            missing["tag"] = "the hard limit of RLIMIT_RTTIME is lower than the tag"
        if self.backend == "portable":
            missing |= WITHOUT_THE_KERNEL
        return states(missing)


def states_for(lacking: Mapping[str, str], backend: str = "linux") -> tuple[LayerState, ...]:
    """The same from mechanisms: a layer holds if ``lacking`` has none that it needs."""
    missing = dict(WITHOUT_THE_KERNEL) if backend == "portable" else {}
    for layer in LAYERS:
        reasons = [lacking[need] for need in layer.needs if need in lacking]
        if reasons:
            missing[layer.name] = "; ".join(reasons)
    return states(missing)


def is_degraded(found: tuple[LayerState, ...]) -> bool:
    """Does a promise not hold?"""
    return any(not state.holds and not state.layer.is_extra for state in found)
