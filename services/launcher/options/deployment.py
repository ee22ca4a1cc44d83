"""A whole deployment as it was asked for: flags, settings of `up`, environment, checkpoint.

A place in it is a dotted path: `tensor_parallel_size` and `additional_config.enable_dsa_cp` are
flags, `settings.port`, `environment.HCCL_BUFFSIZE`, `model.index_topk` and
`transfer.prefill.tp_size` (from the connector that says it) the rest. The tables name paths;
`shown` writes them as the user did.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from services.launcher.options.environment import Environment
from services.launcher.options.facts import ModelFacts
from services.launcher.options.fields import Options, spelled
from services.launcher.options.json_flags import ConnectorExtraConfig, KvTransferConfig, Side
from services.launcher.options.serve import ServeOptions
from services.launcher.settings import UpSettings
from shared.config import flag_of

_ROOTS: Final = ("settings", "environment", "model", "transfer")
# No block of other sizes exists on Ascend.
BLOCK_SIZE: Final = 128


class Transfer(Options):
    """What the connectors of a KV transfer say, wherever in their tree they say it."""

    prefill: Side = Side()
    decode: Side = Side()
    stores: tuple[KvTransferConfig, ...] = ()
    child_engine_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Everything that was asked for.

    Attributes:
        origins: Path -> how it was given, where that is not the path's own flag.
    """

    flags: ServeOptions = field(default_factory=ServeOptions)
    settings: UpSettings = field(default_factory=UpSettings)
    environment: Environment = field(default_factory=Environment)
    model: ModelFacts = field(default_factory=ModelFacts)
    origins: Mapping[str, str] = field(default_factory=dict)

    # Places

    def value(self, path: str) -> Any:  # noqa: ANN401  # any option's
        """What is at a path; None where a group on the way is missing."""
        found: Any = self if path.partition(".")[0] in _ROOTS else self.flags
        for part in path.split("."):
            if found is None:
                return None
            found = getattr(found, part)
        return found

    def is_given(self, path: str) -> bool:
        """Whether a path was named by the user."""
        if path.partition(".")[0] == "model":
            return True
        holder: Any = self if path.partition(".")[0] in _ROOTS else self.flags
        for part in path.split("."):
            if isinstance(holder, BaseModel) and part not in holder.model_fields_set:
                return False
            holder = getattr(holder, part)
        return holder is not None

    def default(self, path: str) -> Any:  # noqa: ANN401  # any option's
        """The value of a path that nobody names."""
        return Deployment.value(_UNASKED, path)

    def is_asked(self, path: str) -> bool:
        """Whether a path was named with something else than its default."""
        return self.is_given(path) and self.value(path) != self.default(path)

    def shown(self, path: str) -> str:
        """A path and its value, as a user writes them."""
        root, _, inner = path.partition(".")
        value = self.value(path)
        if root == "model":
            return f"--model ({inner} {spelled(value)})"
        name = self.origins.get(path, named(path))
        is_flag = root == "settings" or (root not in _ROOTS and not inner)
        if not self.is_given(path):
            default = "" if value is None or isinstance(value, bool | Options) else spelled(value)
            return f"{name} ({default or 'not given'}{', the default' if default else ''})"
        if isinstance(value, Options):
            return name
        if is_flag and isinstance(value, bool):
            return name if value else "--no-" + name.removeprefix("--")
        return f"{name}{' ' if is_flag else '='}{spelled(value)}"

    def with_value(self, path: str, value: object) -> "Deployment":
        """The same with another value at a path of a flag."""
        changed = _changed(self.flags, path.split("."), value)
        return dataclasses.replace(self, flags=changed)

    # What the tables ask again and again

    @property
    def ep_size(self) -> int:
        """Ranks that the experts are spread over."""
        flags = self.flags
        if not flags.enable_expert_parallel:
            return 1
        return (
            flags.data_parallel_size
            * flags.prefill_context_parallel_size
            * flags.tensor_parallel_size
        )

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        flags = self.flags
        return (
            flags.pipeline_parallel_size
            * flags.prefill_context_parallel_size
            * flags.tensor_parallel_size
        )

    @property
    def num_drafts(self) -> int:
        """Draft tokens of a sequence in a step."""
        drafts = self.flags.speculative_config
        return 0 if drafts is None else drafts.num_speculative_tokens

    @property
    def kv_role(self) -> str | None:
        """`kv_producer`, `kv_consumer`, `kv_both`, or None without KV transfer."""
        transfer = self.flags.kv_transfer_config
        return None if transfer is None else transfer.kv_role

    @property
    def is_sparse(self) -> bool:
        """Whether the checkpoint is known to have an indexer."""
        return self.model.index_topk is not None

    @property
    def is_dense(self) -> bool:
        """Whether the checkpoint is known to have none."""
        return self.model.is_known and self.model.index_topk is None

    @property
    def asks_for_graphs(self) -> bool:
        """Whether steps are to be captured."""
        config = self.flags.compilation_config
        return config is not None and config.cudagraph_mode not in {None, "NONE"}

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Sizes of captured steps, if they were listed; steps are captured unless told not to."""
        config = self.flags.compilation_config
        if config is None or config.cudagraph_mode == "NONE" or self.flags.enforce_eager:
            return ()
        return tuple(config.cudagraph_capture_sizes or ())

    @property
    def splits_tokens(self) -> bool:
        """Whether tensor-parallel ranks share the tokens of a step, not only the weights."""
        flags = self.flags
        extra = flags.additional_config
        return flags.tensor_parallel_size > 1 and (
            extra.enable_dsa_cp
            or extra.enable_flashcomm1
            or (self.ep_size > 1 and flags.data_parallel_size > 1)
            or (extra.enable_shared_expert_dp and flags.enable_expert_parallel)
        )

    @property
    def transfer(self) -> Transfer:
        """What the tree of connectors says."""
        root = self.flags.kv_transfer_config
        return Transfer() if root is None else _gather(root)


def named(path: str) -> str:
    """The name of a path: a flag, a key of a flag, a variable."""
    root, _, inner = path.partition(".")
    if root == "environment":
        return inner.replace(".", " ")
    if root == "settings":
        return flag_of(inner)
    if root == "transfer":
        return f"--kv-transfer-config {inner}"
    return f"{flag_of(root)} {inner}".rstrip()


def _changed(group: Any, path: list[str], value: object) -> Any:  # noqa: ANN401  # any group
    name, *inner = path
    new = _changed(getattr(group, name), inner, value) if inner else value
    return group.model_copy(update={name: new})


def _gather(root: KvTransferConfig) -> Transfer:
    children = root.kv_connector_extra_config.connectors or []
    tree = [root, *children]
    extras: list[ConnectorExtraConfig] = [node.kv_connector_extra_config for node in tree]
    return Transfer(
        prefill=_first_side([extra.prefill for extra in extras]),
        decode=_first_side([extra.decode for extra in extras]),
        stores=tuple(node for node in tree if node.kv_connector == "AscendStoreConnector"),
        child_engine_ids=tuple(
            child.engine_id for child in children if child.engine_id is not None
        ),
    )


def _first_side(sides: list[Side]) -> Side:
    return next((side for side in sides if side.model_fields_set), Side())


_UNASKED: Final = Deployment(settings=UpSettings.model_construct())
