"""JSON pointers inside one document: what a schema's `$ref` names."""

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

# Longer ones are past the end of any array.
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")


def resolve_pointer(reference: Any, root: Any) -> Any:  # noqa: ANN401  (any JSON value)
    """What a local JSON pointer points to, None for anything else."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and _INDEX.fullmatch(name) and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
