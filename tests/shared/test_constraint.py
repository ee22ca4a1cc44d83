"""What a constraint weighs."""

from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat


def test_the_size_of_a_constraint_counts_the_bytes_of_all_its_texts() -> None:
    constraint = Constraint(
        format=TextFormat(
            kind=FormatKind.CHOICE, text="é", choices=("ab", "c"), whitespace_pattern=" "
        ),
        calls=CallRules(tools=(CalledTool(name="f", parameters_json="{}"),)),
    )
    assert constraint.num_bytes == 2 + 3 + 1 + 1 + 2
    assert Constraint().num_bytes == 0
