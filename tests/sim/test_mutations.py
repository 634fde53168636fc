"""The check of the checks: each fault put into the kill order breaks a promise.

A property that no fault can break proves nothing. Each fault here is one that was, or could
have been, made; it is put into a fresh copy of the code's text and played with the very
examples that the code as it is passes. A fault whose text is no longer in the code fails:
then the test is to be mended, not the fault forgotten.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sim.copies import Copies, Fault
from tests.sim.machine import machine_for
from tests.sim.promises import PromiseError
from tests.sim.scenes import AT_EACH_INSTANT, SCENES, perform

SAME_EXAMPLES = settings(
    max_examples=120,
    stateful_step_count=15,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)

MEMBERSHIP, PLANNER = "safepool.core.membership", "safepool.core.planner"
SWEEPER, CONTAINMENT = "safepool.sweeper", "safepool.core.containment"

FAULTS = {
    "children are asked first": Fault(
        PLANNER,
        "    for one in found:\n        name, sent =",
        "    for one in reversed(found):\n        name, sent =",
    ),
    "everybody is asked at once": Fault(
        PLANNER, "is_due = one.is_top or", "is_due = True or one.is_top or"
    ),
    "nobody but the roots is asked": Fault(
        PLANNER, "is_due = one.is_top or now >= state.half_at or", "is_due ="
    ),
    "no second look": Fault(PLANNER, "QUIET_LOOKS = 2", "QUIET_LOOKS = 1"),
    "one quiet look is enough to be done": Fault(
        PLANNER, "if looks < QUIET_LOOKS:", "if looks < 1:"
    ),
    "the identity is not checked before a signal": Fault(
        SWEEPER,
        "handle = self._handles.get(name) or self._open(name)",
        "handle = self._handles.get(name) or self._open(self._host.incarnation(name.pid) or name)",
    ),
    "a member is remembered by its pid": Fault(
        MEMBERSHIP,
        "elif name in remembered or name in target.known:",
        "elif pid in {one.pid for one in remembered}:",
    ),
    "a root is known by its pid": Fault(
        MEMBERSHIP,
        "if name in target.roots:",
        "if pid in {one.pid for one in target.roots}:",
    ),
    "members are forgotten": Fault(MEMBERSHIP, "elif name in remembered or", "elif"),
    "an older process passes for a child": Fault(
        MEMBERSHIP, "            if child.start >= parent.start:", "            if True:"
    ),
    "zombies are alive": Fault(
        MEMBERSHIP,
        "in snapshot.alive()\n        if row.pid > 1",
        "in snapshot.rows.values()\n        if row.pid > 1",
    ),
    "the time of birth is ignored": Fault(
        MEMBERSHIP, "run is None or row.start < target.born_from", "run is None"
    ),
    "what others may own by now is swept": Fault(
        MEMBERSHIP, "if child.pid in how or target.is_of_another(child):", "if child.pid in how:"
    ),
    "detached processes are ignored": Fault(
        MEMBERSHIP,
        "is_detached_tag(row.tag) and not _is_named_helper(target, row)",
        "False",
    ),
    "the sweeper does not spare itself": Fault(
        SWEEPER, "target = replace(target, spare=target.spare | {own})", "pass"
    ),
    "SIGKILL before the grace is over": Fault(
        PLANNER, "if now < state.forced_at:", "if now < state.half_at:"
    ),
    "nobody is held": Fault(PLANNER, "may_hold = now < state.hold_ends_at", "may_hold = False"),
    "roots are killed first": Fault(
        PLANNER,
        "Signal(one.row.incarnation, Sig.KILL) for one in reversed(pending)]",
        "Signal(one.row.incarnation, Sig.KILL) for one in pending]",
    ),
    "a deadline for each process": Fault(
        PLANNER,
        "if now < state.ends_at:",
        "if now < max(m.first_seen for m in state.members.values())"
        " + state.ends_at - state.started_at:",
    ),
    "no deadline for holding": Fault(
        PLANNER, "may_hold = now < state.hold_ends_at", "may_hold = True"
    ),
    "newcomers are not killed": Fault(
        PLANNER, "if Sig.KILL not in _sent(state, one)]", "if not state.has_forced]"
    ),
    "signals are repeated at each look": Fault(
        PLANNER, "if is_due and Sig.TERM not in sent:", "if is_due:"
    ),
    "stopped processes are not woken": Fault(
        PLANNER, "if is_due and Sig.CONT not in sent and", "if False and"
    ),
    "who is stuck is not told": Fault(
        PLANNER,
        "    return _finish(state, signals, stuck, now)",
        "    return _finish(state, signals, (), now)",
    ),
    "a refused signal counts as sent": Fault(SWEEPER, "if outcome is Sending.DENIED:", "if False:"),
    "a look that failed shows nobody": Fault(
        SWEEPER, "if self._living.isdisjoint(left):", "if False:"
    ),
    "a container is used whoever is in it": Fault(
        CONTAINMENT, " or not within <= frozenset(step.living)", ""
    ),
    "who is frozen is not looked at again": Fault(
        CONTAINMENT,
        "or not within <= frozenset(step.living)",
        "or not (state.frozen or within <= frozenset(step.living))",
    ),
    "a container is not frozen": Fault(
        SWEEPER, "Containment.HOLD: self._container.freeze,", "Containment.HOLD: lambda: True,"
    ),
    "what the kernel refuses counts as done": Fault(
        SWEEPER, "if act[plan.action]():", "if [act[plan.action]()]:"
    ),
    "who came later is not reckoned with": Fault(
        CONTAINMENT, "if target.born_until is None:", "if True:"
    ),
    "a number that was listed means whoever has it": Fault(
        CONTAINMENT, "name.start < listing.begun_at", "True"
    ),
    "a number that was listed means whoever got it in that tick": Fault(
        CONTAINMENT, "name.start < listing.begun_at", "name.start <= listing.begun_at"
    ),
    "who was born in the tick of the list is left out": Fault(
        CONTAINMENT, "name.start == listing.begun_at", "False"
    ),
    "a container is left frozen": Fault(
        SWEEPER, "            self._container.thaw()\n", "            pass\n"
    ),
    "a container is not used": Fault(CONTAINMENT, "if Sig.STOP in sigs:", "if False:"),
    "who went out before the freeze counts as held": Fault(
        CONTAINMENT, "left, outlived = state.frozen & outside,", "left, outlived = frozenset(),"
    ),
    "who went out before the kill counts as killed": Fault(
        CONTAINMENT,
        "state.frozen & outside, state.killed & outside",
        "state.frozen & outside, frozenset()",
    ),
    "who was let go is reported as ended": Fault(
        PLANNER, "    if not left:\n        return state\n", "    return state\n"
    ),
    "who was let go stays stopped": Fault(
        PLANNER, "if name not in kept.members and Sig.STOP in member.sent", "if False"
    ),
    "marks are not looked at": Fault(
        MEMBERSHIP, 'return "mark" if is_marked else', 'return "mark" if False else'
    ),
}


def play_everything(copies: Copies) -> None:
    """The scenes with a fixed script, which are quick, then the same random examples."""
    for name in (*SCENES, *AT_EACH_INSTANT):
        perform(name, copies)
    run_state_machine_as_test(machine_for(copies), settings=SAME_EXAMPLES)


def test_the_code_as_it_is_passes_these_examples() -> None:
    """What the faults below break is whole without them."""
    play_everything(Copies())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_breaks_a_promise(name: str) -> None:
    """No fault in the kill order goes unnoticed."""
    with pytest.raises((PromiseError, ValueError)):
        play_everything(Copies(FAULTS[name]))


def test_a_fault_whose_text_is_gone_is_told() -> None:
    """A text that was rewritten does not make its fault pass for caught."""
    with pytest.raises(AssertionError, match="0 times, not once"):
        Copies(Fault(PLANNER, "a text that nobody wrote", ""))
    with pytest.raises(AssertionError, match="no copy"):
        Copies(Fault("safepool.pool", "import", ""))
