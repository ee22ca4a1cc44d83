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


def test_many_waiting_pieces_are_joined_and_say_the_same() -> None:
    delta = Delta(content=["ab"] * 3000, reasoning=["c"] * 10)
    delta.tools = [ToolPiece(0, "id", "f"), *(ToolPiece(0, arguments="x") for _ in range(2000))]
    delta.tools.append(ToolPiece(1, "id2", "g", "{}"))
    delta.compact()
    assert delta.content == ["ab" * 3000]
    assert delta.reasoning == ["c"] * 10
    assert delta.tools == [ToolPiece(0, "id", "f", "x" * 2000), ToolPiece(1, "id2", "g", "{}")]
    delta.tools.append(ToolPiece(1, arguments="y"))
    assert [piece.arguments for piece in delta.merged_tools()] == ["x" * 2000, "{}y"]


def test_an_empty_delta_is_false_and_its_size_is_counted() -> None:
    assert not Delta()
    delta = Delta(reasoning=["ab"], content=["c"], tools=[ToolPiece(0, "id", "f", "{}")])
    assert delta
    assert delta.num_chars == 6
