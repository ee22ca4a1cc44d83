"""New output of one choice, in pieces that can be joined: merging deltas is appending."""

from dataclasses import dataclass, field

_MAX_PIECES = 1024


@dataclass(slots=True)
class ToolPiece:
    """Next part of a tool call; `call_id` and `name` are set in the first piece of a call only."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What has been produced since the delta was taken last."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    tools: list[ToolPiece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tools)

    @property
    def num_chars(self) -> int:
        """Size, to bound what is kept for a slow reader."""
        total = sum(map(len, self.content)) + sum(map(len, self.reasoning))
        return total + sum(len(piece.name) + len(piece.arguments) for piece in self.tools)

    def compact(self) -> None:
        """Join what waits: thousands of short pieces take many times the memory of their text."""
        for pieces in (self.reasoning, self.content):
            if len(pieces) > _MAX_PIECES:
                pieces[:] = ["".join(pieces)]
        if len(self.tools) > _MAX_PIECES:
            self.tools = self.merged_tools()

    def merged_tools(self) -> list[ToolPiece]:
        """One piece per call, in order."""
        merged: list[ToolPiece] = []
        arguments: list[str] = []
        for piece in self.tools:
            if not merged or merged[-1].index != piece.index:
                _close(merged, arguments)
                merged.append(ToolPiece(piece.index, piece.call_id, piece.name))
                arguments = []
            arguments.append(piece.arguments)
        _close(merged, arguments)
        return merged


def _close(merged: list[ToolPiece], arguments: list[str]) -> None:
    if merged:
        merged[-1].arguments = "".join(arguments)
