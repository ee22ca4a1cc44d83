"""The cases are the models and steps that they say they are."""

from benchmarks import random_model
from services.worker.model.config import FULL, SHARED, ModelConfig
from tools.npu_contract.cases import STEPS, make_step, model_configs


def test_the_benchmarks_sizes_are_those_of_the_race() -> None:
    race = ModelConfig.from_dict(random_model._config())
    ours = model_configs()["benchmark"]
    differing = {
        name for name in ModelConfig.__slots__ if getattr(race, name) != getattr(ours, name)
    }
    assert differing <= {"eos_token_ids"}


def test_the_full_size_model_has_every_kind_of_layer() -> None:
    config = model_configs()["glm-5.2"]
    kinds = set(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    assert {(FULL, "dense"), (SHARED, "sparse"), (FULL, "sparse")} == kinds
    assert config.softmax_scale == 0.0625


def test_a_step_gives_each_sequence_blocks_of_its_own() -> None:
    for case in STEPS.values():
        token_ids, step = make_step(case, "cpu")
        assert token_ids.shape == step.positions.shape == step.slot_mapping.shape
        assert int(step.cum_query_lens[-1]) == step.num_tokens
        owned = step.block_table[step.block_table > 0].tolist()
        assert len(owned) == len(set(owned))
        row = 0
        for token, slot in enumerate(step.slot_mapping.tolist()):
            while token >= int(step.cum_query_lens[row]):
                row += 1
            position = int(step.positions[token])
            block = int(step.block_table[row, position // 128]) if case.seq_lens[row] else 0
            assert slot == block * 128 + position % 128
