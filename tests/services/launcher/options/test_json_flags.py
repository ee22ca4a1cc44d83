import pytest
from pydantic import ValidationError

from services.launcher.options.json_flags import (
    CompilationConfig,
    KvTransferConfig,
    SpeculativeConfig,
)


def test_a_tree_of_connectors_is_read_to_the_leaves() -> None:
    tree = KvTransferConfig.model_validate(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {
                "connectors": [
                    {
                        "kv_connector": "MooncakeConnectorV1",
                        "kv_role": "kv_consumer",
                        "kv_port": "30100",
                        "kv_connector_extra_config": {"decode": {"dp_size": 8, "tp_size": 4}},
                    }
                ]
            },
        }
    )
    assert tree.kv_connector_extra_config.connectors is not None
    child = tree.kv_connector_extra_config.connectors[0]
    assert child.kv_port == 30100
    assert child.kv_connector_extra_config.decode.tp_size == 4


def test_modes_are_read_in_either_case() -> None:
    assert CompilationConfig.model_validate(
        {"cudagraph_mode": "full_decode_only"}
    ) == CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY")


@pytest.mark.parametrize("number", [0, 129, "x", None, 1.5, True])
def test_draft_counts_have_bounds(number: object) -> None:
    with pytest.raises(ValidationError):
        SpeculativeConfig.model_validate({"num_speculative_tokens": number})
