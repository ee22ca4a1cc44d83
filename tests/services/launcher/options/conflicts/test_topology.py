import pytest

from services.launcher.options.conflicts.topology import TOPOLOGY
from tests.services.launcher.options.cases import (
    DECODE,
    MULTI,
    PREFILL,
    STORE,
    Case,
    check_case,
    check_table,
    join,
    transfer,
)

CASES = (
    Case(
        key="prefill-dp-size",
        meets=join(
            "-dp 4", transfer({**PREFILL, "kv_connector_extra_config": {"prefill": {"dp_size": 2}}})
        ),
        passes=join(
            "-dp 4", transfer({**PREFILL, "kv_connector_extra_config": {"prefill": {"dp_size": 4}}})
        ),
    ),
    Case(
        key="prefill-tp-size",
        meets=join(
            "-tp 8",
            transfer({**PREFILL, "kv_connector_extra_config": {"prefill": {"tp_size": 16}}}),
        ),
        passes=join(
            "-tp 16",
            transfer({**PREFILL, "kv_connector_extra_config": {"prefill": {"tp_size": 16}}}),
        ),
    ),
    Case(
        key="prefill-pp-size",
        meets=join(
            "-pp 2", transfer({**PREFILL, "kv_connector_extra_config": {"prefill": {"pp_size": 1}}})
        ),
        passes=join(
            "-pp 2", transfer({**PREFILL, "kv_connector_extra_config": {"prefill": {"pp_size": 2}}})
        ),
    ),
    Case(
        key="decode-dp-size",
        meets=join(
            "-dp 4",
            transfer(
                {
                    **MULTI,
                    "kv_connector_extra_config": {
                        "connectors": [
                            {**DECODE, "kv_connector_extra_config": {"decode": {"dp_size": 8}}}
                        ]
                    },
                }
            ),
        ),
        passes=join(
            "-dp 8",
            transfer(
                {
                    **MULTI,
                    "kv_connector_extra_config": {
                        "connectors": [
                            {**DECODE, "kv_connector_extra_config": {"decode": {"dp_size": 8}}}
                        ]
                    },
                }
            ),
        ),
    ),
    Case(
        key="decode-tp-size",
        meets=join(
            "-tp 4", transfer({**DECODE, "kv_connector_extra_config": {"decode": {"tp_size": 2}}})
        ),
        passes=join(
            "-tp 2", transfer({**DECODE, "kv_connector_extra_config": {"decode": {"tp_size": 2}}})
        ),
    ),
    Case(
        key="sides-tp",
        meets=join(
            "-tp 4",
            transfer(
                {
                    **PREFILL,
                    "kv_connector_extra_config": {
                        "prefill": {"tp_size": 4},
                        "decode": {"tp_size": 8},
                    },
                }
            ),
        ),
        passes=join(
            "-tp 16",
            transfer(
                {
                    **PREFILL,
                    "kv_connector_extra_config": {
                        "prefill": {"tp_size": 16},
                        "decode": {"tp_size": 8},
                    },
                }
            ),
        ),
    ),
    Case(
        key="sides-decode-pp",
        meets=transfer({**PREFILL, "kv_connector_extra_config": {"decode": {"pp_size": 2}}}),
        passes=transfer({**PREFILL, "kv_connector_extra_config": {"decode": {"pp_size": 1}}}),
    ),
    Case(
        key="said-partition-stages",
        meets=transfer(
            {
                **DECODE,
                "kv_connector_extra_config": {
                    "prefill": {"pp_size": 1, "pp_layer_partition": "41,37"}
                },
            }
        ),
        passes=transfer(
            {
                **DECODE,
                "kv_connector_extra_config": {
                    "prefill": {"pp_size": 2, "pp_layer_partition": "41,37"}
                },
            }
        ),
    ),
    Case(
        key="said-partition-layers",
        meets=transfer(
            {
                **DECODE,
                "kv_connector_extra_config": {
                    "prefill": {"pp_size": 2, "pp_layer_partition": "41,36"}
                },
            }
        ),
        passes=transfer(
            {
                **DECODE,
                "kv_connector_extra_config": {
                    "prefill": {"pp_size": 2, "pp_layer_partition": "41,37"}
                },
            }
        ),
    ),
    Case(
        key="said-partition-own",
        meets=join(
            "VLLM_PP_LAYER_PARTITION=40,38 -pp 2",
            transfer(
                {
                    **PREFILL,
                    "kv_connector_extra_config": {
                        "prefill": {"pp_size": 2, "pp_layer_partition": "41,37"}
                    },
                }
            ),
        ),
        passes=join(
            "VLLM_PP_LAYER_PARTITION=41,37 -pp 2",
            transfer(
                {
                    **PREFILL,
                    "kv_connector_extra_config": {
                        "prefill": {"pp_size": 2, "pp_layer_partition": "41,37"}
                    },
                }
            ),
        ),
    ),
    Case(
        key="children-engine-id",
        meets=transfer(
            {
                **MULTI,
                "engine_id": "1",
                "kv_connector_extra_config": {"connectors": [{**DECODE, "engine_id": "2"}]},
            }
        ),
        passes=transfer(
            {**MULTI, "engine_id": "1", "kv_connector_extra_config": {"connectors": [DECODE]}}
        ),
    ),
    Case(
        key="children-connector",
        meets=transfer({"kv_connector": "MultiConnector", "kv_role": "kv_both"}),
        passes=transfer({**MULTI, "kv_connector_extra_config": {"connectors": [DECODE]}}),
    ),
    Case(
        key="store-async",
        meets=join(
            "MOONCAKE_CONFIG_PATH=/x",
            transfer({**STORE, "kv_connector_extra_config": {"load_async": True}}),
        ),
        passes=join(
            "MOONCAKE_CONFIG_PATH=/x",
            transfer(
                {
                    **STORE,
                    "kv_connector_extra_config": {"load_async": True, "consumer_is_to_load": True},
                }
            ),
        ),
    ),
    Case(
        key="store-file",
        meets=transfer(STORE),
        passes=join("MOONCAKE_CONFIG_PATH=/x", transfer(STORE)),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(TOPOLOGY, case)


def test_every_rule_has_its_case() -> None:
    check_table(TOPOLOGY, CASES)
