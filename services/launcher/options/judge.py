"""The verdict on a deployment: what ends the start, what is told, and what is left to honour."""

from dataclasses import dataclass

from services.launcher.options.conflicts.table import CONFLICTS
from services.launcher.options.deployment import Deployment
from services.launcher.options.idle import IDLE
from services.launcher.options.rules import Outcome
from services.launcher.options.unbuilt import UNBUILT


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from what was asked.

    Attributes:
        refusals: Reasons not to start, conflicts first; empty: start.
        lines: What the user must know in any case.
        deployment: What was asked less what was switched off.
    """

    refusals: tuple[str, ...]
    lines: tuple[str, ...]
    deployment: Deployment


def judge(asked: Deployment) -> Verdict:
    """Hold a deployment against all tables.

    Conflicts are looked for in what was asked; what is not built, in what is left of it.
    """
    refusals = [
        rule.message(asked)
        for rule in CONFLICTS
        if rule.outcome is Outcome.REFUSE and rule.holds(asked)
    ]
    left, lines = _switch_off(asked)
    lines += [
        rule.message(left)
        for rule in CONFLICTS
        if rule.outcome is Outcome.WARN and rule.holds(left)
    ]
    refusals += [rule.message(left) for rule in UNBUILT if rule.is_asked(left)]
    for rule in IDLE:
        if told := rule.told(left):
            lines.append(f"{', '.join(told)}: no effect: {rule.reason}")
    return Verdict(refusals=tuple(refusals), lines=tuple(lines), deployment=left)


def _switch_off(asked: Deployment) -> tuple[Deployment, list[str]]:
    left, lines = asked, []
    for rule in CONFLICTS:
        if rule.outcome is Outcome.SWITCH_OFF and rule.holds(left):
            lines.append(rule.message(left))
            left = left.with_value(rule.names[0], rule.becomes)
    return left, lines
