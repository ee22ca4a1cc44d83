"""A constraint as the text of one grammar of the engine."""

from services.worker.grammar.calls import add_call_body, add_calls
from services.worker.grammar.formats import add_format
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.grammar.writer import GrammarWriter, refused
from shared.constraint import MAX_CONSTRAINT_BYTES, Constraint


def is_triggered(constraint: Constraint) -> bool:
    """Whether the output is ordinary text until it opens a call, and again behind each."""
    calls = constraint.calls
    return constraint.format is None and calls is not None and not calls.is_required


def translate(constraint: Constraint, vocabulary: EngineVocabulary) -> str:
    """The grammar; of a triggered constraint that of one call behind its opening tag.

    Raises:
        RequestError: A part cannot be used, and why.
    """
    if constraint.num_bytes > MAX_CONSTRAINT_BYTES:
        text = f"{constraint.num_bytes} bytes are more than {MAX_CONSTRAINT_BYTES}"
        raise refused("constraint", text)
    try:
        return _translated(constraint, vocabulary)
    except RecursionError:
        raise refused("constraint", "it nests too deep") from None


def _translated(constraint: Constraint, vocabulary: EngineVocabulary) -> str:
    writer = GrammarWriter(vocabulary)
    control = vocabulary.control
    if is_triggered(constraint):
        assert constraint.calls is not None
        return writer.finish(add_call_body(writer, constraint.calls, control))
    parts = []
    if constraint.format is not None:
        parts.append(add_format(writer, constraint.format))
    if constraint.calls is not None:
        parts.append(add_calls(writer, constraint.calls, control))
    if not parts:
        raise refused("constraint", "it has neither a format nor calls")
    return writer.finish(" | ".join(parts))
