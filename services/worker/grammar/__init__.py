"""Grammars beside sampling: what a constraint allows as the next token of a row."""
