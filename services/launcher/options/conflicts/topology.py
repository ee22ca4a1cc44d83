"""Conflicts of what connectors say about both sides of a pair, and of KV stores."""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.json_flags import Side
from services.launcher.options.rules import Conflict, Outcome, Predicate

_ROLE = "kv_transfer_config.kv_role"
_PARTITION = "environment.VLLM_PP_LAYER_PARTITION"
_MOONCAKE = "vllm-ascend distributed/kv_transfer/kv_p2p/mooncake_connector.py"
_STORE = "vllm-ascend distributed/kv_transfer/kv_pool/ascend_store"
_SIDES: Final = {"kv_producer": "prefill", "kv_consumer": "decode"}


def _own_side(asked: Deployment, role: str) -> Side:
    """What the connector says of this node, if the node has that role."""
    if asked.kv_role != role:
        return Side()
    side: Side = getattr(asked.transfer, _SIDES[role])
    return side


def _differs(role: str, key: str, flag: str) -> Predicate:
    def holds(asked: Deployment) -> bool:
        said = getattr(_own_side(asked, role), key)
        return said is not None and said != getattr(asked.flags, flag)

    return holds


def _own_size(role: str, key: str, flag: str) -> Conflict:
    side = _SIDES[role]
    return Conflict(
        key=f"{side}-{key.replace('_', '-')}",
        names=(f"transfer.{side}.{key}", flag, _ROLE),
        holds=_differs(role, key, flag),
        outcome=Outcome.REFUSE,
        text=f"this is a {side} node, and the connector's {side} must say how it is cut",
        source=_MOONCAKE,
    )


def _ratio_is_uneven(asked: Deployment) -> bool:
    many, few = asked.transfer.prefill.tp_size, asked.transfer.decode.tp_size
    return many is not None and few is not None and many % few != 0


def _partition(side: Side) -> list[str]:
    return [part.strip() for part in (side.pp_layer_partition or "").split(",") if part.strip()]


def _said_stages_differ(asked: Deployment) -> bool:
    prefill = asked.transfer.prefill
    layers = _partition(prefill)
    return bool(layers) and len(layers) != (prefill.pp_size or 1)


def _said_layers_differ(asked: Deployment) -> bool:
    layers, total = _partition(asked.transfer.prefill), asked.model.num_hidden_layers
    if not layers or total is None:
        return False
    return not all(part.isdecimal() for part in layers) or sum(map(int, layers)) != total


def _partitions_differ(asked: Deployment) -> bool:
    if asked.kv_role != "kv_producer" or asked.flags.pipeline_parallel_size == 1:
        return False
    if not asked.transfer.prefill.model_fields_set:
        return False
    own = [str(size) for size in asked.environment.VLLM_PP_LAYER_PARTITION or []]
    return own != _partition(asked.transfer.prefill)


def _loads_nothing(asked: Deployment) -> bool:
    return any(
        store.kv_role == "kv_consumer"
        and store.kv_connector_extra_config.load_async
        and not store.kv_connector_extra_config.consumer_is_to_load
        for store in asked.transfer.stores
    )


def _store_has_no_file(asked: Deployment) -> bool:
    return asked.environment.MOONCAKE_CONFIG_PATH is None and any(
        store.kv_connector_extra_config.backend == "mooncake" for store in asked.transfer.stores
    )


TOPOLOGY: Final = (
    _own_size("kv_producer", "dp_size", "data_parallel_size"),
    _own_size("kv_producer", "tp_size", "tensor_parallel_size"),
    _own_size("kv_producer", "pp_size", "pipeline_parallel_size"),
    _own_size("kv_consumer", "dp_size", "data_parallel_size"),
    _own_size("kv_consumer", "tp_size", "tensor_parallel_size"),
    Conflict(
        key="sides-tp",
        names=("transfer.prefill.tp_size", "transfer.decode.tp_size"),
        holds=_ratio_is_uneven,
        outcome=Outcome.REFUSE,
        text="the ranks of prefill must be a multiple of those of decode",
        source=_MOONCAKE,
    ),
    Conflict(
        key="sides-decode-pp",
        names=("transfer.decode.pp_size", "kv_transfer_config.kv_connector"),
        holds=lambda asked: asked.transfer.decode.pp_size not in {None, 1},
        outcome=Outcome.REFUSE,
        text="decode has one stage",
        source=_MOONCAKE,
    ),
    Conflict(
        key="said-partition-stages",
        names=("transfer.prefill.pp_layer_partition", "transfer.prefill.pp_size"),
        holds=_said_stages_differ,
        outcome=Outcome.REFUSE,
        text="the list needs one number for each stage",
        source=_MOONCAKE,
    ),
    Conflict(
        key="said-partition-layers",
        names=("transfer.prefill.pp_layer_partition", "model.num_hidden_layers"),
        holds=_said_layers_differ,
        outcome=Outcome.REFUSE,
        text="the stages must hold each layer once",
        source=_MOONCAKE,
    ),
    Conflict(
        key="said-partition-own",
        names=("transfer.prefill.pp_layer_partition", _PARTITION, "pipeline_parallel_size"),
        holds=_partitions_differ,
        outcome=Outcome.REFUSE,
        text="decode would look for layers in the wrong stage; give both the same list, or neither",
        source=_MOONCAKE,
    ),
    Conflict(
        key="children-engine-id",
        names=("transfer.child_engine_ids", "kv_transfer_config.engine_id"),
        holds=lambda asked: bool(asked.transfer.child_engine_ids),
        outcome=Outcome.REFUSE,
        text="children of a MultiConnector have their parent's engine_id and must not name one",
        source="vLLM distributed/kv_transfer/kv_connector/v1/multi_connector.py",
    ),
    Conflict(
        key="children-connector",
        names=(
            "kv_transfer_config.kv_connector_extra_config.connectors",
            "kv_transfer_config.kv_connector",
        ),
        holds=lambda asked: (
            (asked.value("kv_transfer_config.kv_connector") == "MultiConnector")
            != bool(asked.value("kv_transfer_config.kv_connector_extra_config.connectors"))
        ),
        outcome=Outcome.REFUSE,
        text="a MultiConnector has children, and no other connector has",
        source="vLLM distributed/kv_transfer/kv_connector/v1/multi_connector.py",
    ),
    Conflict(
        key="store-async",
        names=("kv_transfer_config.kv_connector_extra_config", _ROLE),
        holds=_loads_nothing,
        outcome=Outcome.WARN,
        text="a decode node's AscendStoreConnector loads only with consumer_is_to_load; load_async "
        "alone does nothing",
        source=_STORE,
    ),
    Conflict(
        key="store-file",
        names=("kv_transfer_config.kv_connector_extra_config", "environment.MOONCAKE_CONFIG_PATH"),
        holds=_store_has_no_file,
        outcome=Outcome.REFUSE,
        text="an AscendStoreConnector with the mooncake backend reads that file",
        source=_STORE,
    ),
)
