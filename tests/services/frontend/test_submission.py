"""The plain values agree with the contract."""

from dataclasses import fields

from protos.glm.v1 import detokenizer_pb2
from services.frontend.submission import ObjectKind, OutputPlan, ToolChoice


def test_numbers_of_enums_are_those_of_the_contract() -> None:
    for kind in ObjectKind:
        assert detokenizer_pb2.ObjectKind.Value(f"OBJECT_KIND_{kind.name}") == kind
    for choice in ToolChoice:
        assert detokenizer_pb2.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.name}") == choice


def test_every_field_of_the_output_plan_is_one_of_the_contract() -> None:
    known = {field.name for field in detokenizer_pb2.OutputSpec.DESCRIPTOR.fields}
    assert known == {field.name for field in fields(OutputPlan)}
