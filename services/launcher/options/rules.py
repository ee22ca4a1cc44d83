"""What a table of options is made of. A rule is data: names, when it holds, what follows, and why.

Every name is a path of `Deployment`; every message shows all names of its rule with their values.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from services.launcher.options.deployment import Deployment

Predicate = Callable[[Deployment], bool]


class Outcome(enum.Enum):
    """What follows when two options meet."""

    REFUSE = "refused"
    SWITCH_OFF = "switched off"
    WARN = "warned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Options that exclude each other.

    Attributes:
        key: Short name of the rule.
        names: The options; with SWITCH_OFF the first one is changed.
        holds: Whether they meet here.
        text: Why they do not go together.
        source: Where the rule comes from.
        becomes: What SWITCH_OFF puts in place of the first one.
    """

    key: str
    names: tuple[str, ...]
    holds: Predicate
    outcome: Outcome
    text: str
    source: str
    becomes: object = False

    def message(self, deployment: Deployment) -> str:
        """The rule as it meets this deployment."""
        first, *others = [deployment.shown(name) for name in self.names]
        if self.outcome is Outcome.SWITCH_OFF:
            now = f"now {self.becomes}" if type(self.becomes) is int else "switched off"
            return f"{first}: {now} because of {' and '.join(others)}: {self.text}"
        return f"{first} with {' and '.join(others)}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbuilt:
    """An option whose feature is missing here; asking for it ends the start."""

    name: str
    missing: str
    asks: Predicate | None = None

    def is_asked(self, deployment: Deployment) -> bool:
        """Whether the user asks for the feature; naming the default does not."""
        asked = deployment.is_asked(self.name)
        return asked and (self.asks is None or self.asks(deployment))

    def message(self, deployment: Deployment) -> str:
        """The refusal."""
        return f"{deployment.shown(self.name)}: not available: {self.missing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Options that mean nothing here: told, then ignored."""

    names: tuple[str, ...]
    reason: str
    when: Predicate | None = None

    def told(self, deployment: Deployment) -> list[str]:
        """The options of this rule that the user asked for in vain."""
        if self.when is not None and not self.when(deployment):
            return []
        return [deployment.shown(name) for name in self.names if deployment.is_asked(name)]
