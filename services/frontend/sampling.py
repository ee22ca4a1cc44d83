"""From request fields to a complete `SamplingSpec`, and the seed of every choice."""

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from services.frontend.errors import context_exceeded, invalid
from services.frontend.schemas.fields import SamplingFields
from services.frontend.validation import quote
from shared.errors import CheckpointError
from shared.sampling import SamplingSpec

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # the increment of splitmix64
# Below it float32 logits overflow when divided; such a temperature means greedy.
_MIN_TEMPERATURE: Final = 1e-5
# The smallest mass that float32 keeps apart from 0, with a margin; it selects one token anyway.
_MIN_TOP_P: Final = 1e-9
_NUMBER: Final = (int, float)
# What a checkpoint may set: type, least and greatest value, those of a request.
_DEFAULT_RANGES: Final[dict[str, tuple[Any, float, float]]] = {
    "temperature": (_NUMBER, 0, 2),
    "top_p": (_NUMBER, _MIN_TOP_P, 1),
    "top_k": (int, -1, (1 << 31) - 1),
    "min_p": (_NUMBER, 0, 1),
    "repetition_penalty": (_NUMBER, 1e-6, 1e6),
}

CheckIds = Callable[[list[int], str], None]


class Seeds:
    """Seeds for requests that bring none: random, or a sequence that follows from one seed."""

    def __init__(self, seed: int | None = None) -> None:
        """Random seeds for None; else the same sequence for the same seed."""
        self._seed = None if seed is None else seed & _MASK
        self._num_drawn = 0

    def draw(self) -> int:
        """The next seed, one that a client may send, too."""
        if self._seed is None:
            return secrets.randbits(63)
        self._num_drawn += 1
        return choice_seed(self._seed, self._num_drawn) >> 1


def sampling_defaults(
    generation_config: Mapping[str, Any], eos_token_ids: Sequence[int]
) -> SamplingSpec:
    """The checkpoint's own defaults, what it does not set is off; end ids primary first.

    Raises:
        CheckpointError: A value that no request could ask for.
    """
    found = {
        name: generation_config[name]
        for name in _DEFAULT_RANGES
        if generation_config.get(name) is not None
    }
    for name, value in found.items():
        kind, least, most = _DEFAULT_RANGES[name]
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not is_kind or not least <= value <= most:
            raise CheckpointError(
                f"generation_config.json: {name} is {value!r}, allowed is {least:g} to {most:g}"
            )
    do_sample = generation_config.get("do_sample")
    if do_sample not in (None, True, False):
        raise CheckpointError(
            f"generation_config.json: do_sample is {do_sample!r}, allowed is true or false"
        )
    if do_sample is False:
        found["temperature"] = 0.0
    return dataclasses.replace(SamplingSpec(), **found, eos_token_ids=tuple(eos_token_ids))


def build_sampling(
    request: SamplingFields,
    defaults: SamplingSpec,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    check_ids: CheckIds,
    seeds: Seeds,
) -> SamplingSpec:
    """Every setting resolved; id ranges checked.

    Args:
        request: The parsed body.
        defaults: The checkpoint's.
        max_tokens: Resolved bound of the output.
        num_logprobs: Resolved; None for no logprobs.
        check_ids: Refuses ids outside the vocabulary, naming the field.
        seeds: For requests without a seed.
    """
    stop_ids = request.stop_token_ids or []
    check_ids(stop_ids, "stop_token_ids")
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"Invalid 'min_tokens': {quote(min_tokens)} is more than the most tokens to generate "
            f"({max_tokens}).",
            "min_tokens",
        )
    temperature = _given(request.temperature, defaults.temperature)
    top_k = _given(request.top_k, defaults.top_k)
    return dataclasses.replace(
        defaults,
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
        top_p=max(_given(request.top_p, defaults.top_p), _MIN_TOP_P),
        # More than any vocabulary is the same as off, and fits no wire type.
        top_k=top_k if 0 < top_k < 1 << 31 else 0,
        min_p=_given(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        seed=seeds.draw() if request.seed is None else request.seed & _MASK,
        num_logprobs=num_logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=_bias(request.logit_bias, check_ids),
    )


def resolve_max_tokens(
    asked: int | None, *, num_prompt: int, limit: int, default: int | None, param: str
) -> int:
    """The bound of the output: what was asked, else the default, else the room that is left.

    Raises:
        ApiError: The prompt leaves no room, or less than was asked.
    """
    room = limit - num_prompt
    if room < 1:
        raise context_exceeded(limit, num_prompt, asked, param)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise context_exceeded(limit, num_prompt, asked, param)
    return asked


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: the base for the first, mixed with its number for the others."""
    if choice == 0:
        return seed
    mixed = (seed + choice * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def _given(value: Any, default: Any) -> Any:  # noqa: ANN401  # a number of either kind
    return default if value is None else value


def _bias(given: Mapping[str, float] | None, check_ids: CheckIds) -> tuple[tuple[int, float], ...]:
    bias: dict[int, float] = {}
    for key, value in (given or {}).items():
        # isdecimal takes digits of any script, int() as well; ascii keeps to JSON's.
        if not (key.isascii() and key.isdecimal() and len(key) < 12):
            raise invalid(
                f"Invalid 'logit_bias': key {quote(key)} is not a token id.", "logit_bias"
            )
        token_id = int(key)
        check_ids([token_id], "logit_bias")
        if token_id in bias:
            raise invalid(
                f"Invalid 'logit_bias': token id {token_id} stands twice, once as {quote(key)}.",
                "logit_bias",
            )
        bias[token_id] = value
    return tuple(bias.items())
