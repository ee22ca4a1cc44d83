import json
from pathlib import Path

import pytest

from services.launcher.options.facts import ModelFacts, read_facts
from services.launcher.settings import default_model


def test_the_sizes_of_a_checkpoint_are_read() -> None:
    facts = read_facts(default_model())
    assert facts.is_known
    assert facts.num_attention_heads == 4
    assert facts.index_topk == 128
    assert facts.num_nextn_predict_layers == 1
    assert not facts.has_quant_description


def test_a_quantized_checkpoint_is_known_by_its_description(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    description = {"version": "1.0.0", "a.weight": "W8A8", "b.weight": "FLOAT", "is_rot_used": True}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(description))
    facts = read_facts(tmp_path)
    assert facts.has_quant_description
    assert facts.quant_types == {"W8A8"}


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"hidden_size": "x"}'])
def test_what_cannot_be_read_is_left_to_the_services(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "quant_model_description.json").write_text(text)
    facts = read_facts(tmp_path)
    assert facts.hidden_size is None
    assert facts.has_quant_description
    assert not facts.quant_types
    assert read_facts(tmp_path / "none") == ModelFacts()
