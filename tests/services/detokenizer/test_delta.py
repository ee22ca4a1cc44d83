from services.detokenizer.delta import Delta, ToolPiece


def test_pieces_of_a_call_merge_and_calls_stay_apart() -> None:
    delta = Delta(
        tools=[
            ToolPiece(0, "a", "f"),
            ToolPiece(0, arguments='{"x": '),
            ToolPiece(0, arguments="1}"),
            ToolPiece(1, "b", "g", "{}"),
        ]
    )
    assert delta.merged_tools() == [
        ToolPiece(0, "a", "f", '{"x": 1}'),
        ToolPiece(1, "b", "g", "{}"),
    ]


def test_an_empty_delta_is_false_and_its_size_is_counted() -> None:
    assert not Delta()
    delta = Delta(reasoning=["ab"], content=["c"], tools=[ToolPiece(0, "id", "f", "{}")])
    assert delta
    assert delta.num_chars == 6
