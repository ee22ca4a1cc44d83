"""Settings of the frontend; flag names as in vLLM where vLLM has the flag."""

import json
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, field_validator

from services.frontend.resubmission import ResubmitBounds
from shared.config import Addresses, ServiceSettings
from shared.errors import CheckpointError

WorkerMode = Literal["model", "replay"]


class FrontendSettings(ServiceSettings):
    """What the frontend is told."""

    service: ClassVar[str] = "frontend"

    detokenizer_address: Addresses = Field(
        description="gRPC address of a detokenizer; several are a,b or repeated."
    )
    model: Path = Field(description="Checkpoint folder; tokenizer, template and config are read.")
    host: str = Field(default="127.0.0.1", description="Address the HTTP server listens on.")
    port: int = Field(default=8000, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    reuse_port: bool = Field(
        default=False, description="Several processes may listen on the port at once."
    )
    served_model_name: list[str] = Field(
        default_factory=list,
        description="Names clients may use, repeatable; the first stands in answers. "
        "Default: the folder's name.",
    )
    api_key: list[SecretStr] = Field(
        default_factory=list, description="Key that /v1 asks for, repeatable; none means open."
    )
    api_key_file: Path | None = Field(
        default=None,
        description="JSON file with digests of further keys, each with its own bounds.",
    )
    key_limits_path: Path | None = Field(
        default=None,
        description="Folder in which several processes count the requests of bounded keys "
        "together; default: each counts alone.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Origins of web pages that may ask (CORS), repeatable; * is all, none is off.",
    )
    allowed_methods: list[str] = Field(
        default=["*"], description="Methods that such pages may use, repeatable."
    )
    allowed_headers: list[str] = Field(
        default=["*"], description="Headers that such pages may send, repeatable."
    )
    allow_credentials: bool = Field(
        default=False, description="Such pages may send cookies and keys of the browser."
    )
    enable_dev_routes: bool = Field(
        default=False, description="Serve POST /reset_prefix_cache, for tests and trainers."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest prompt plus output; default: the checkpoint's."
    )
    reasoning_parser: Literal["glm45", "none"] = Field(
        default="glm45", description="Splits thinking from the answer."
    )
    tool_call_parser: Literal["glm47", "none"] = Field(
        default="glm47", description="Turns calls in the output into tool_calls."
    )
    seed: int | None = Field(
        default=None,
        ge=-(1 << 63),
        lt=1 << 63,
        description="Requests without a seed get seeds that follow from it and from their order; "
        "random ones if not given.",
    )
    worker_mode: WorkerMode = Field(
        default="model", description="replay: each request brings the output it wants."
    )
    max_concurrent_requests: int = Field(
        default=1024, ge=1, description="Requests in work at once; more are answered 429."
    )
    max_body_bytes: int = Field(
        default=16 << 20, ge=1024, description="Largest request body; more is answered 413."
    )
    max_held_body_bytes: int = Field(
        default=256 << 20, ge=1024, description="Bodies in memory at once; more are answered 429."
    )
    body_timeout_s: float = Field(default=60.0, gt=0, description="For a body to arrive.")
    verdict_timeout_s: float = Field(
        default=10.0, gt=0, description="For the mesh to take or refuse a request."
    )
    request_timeout_s: float = Field(
        default=3600.0, gt=0, le=86400, description="Whole time of a request."
    )
    silence_timeout_s: float = Field(
        default=5.0, ge=3.0, description="A detokenizer that says nothing for so long is lost."
    )
    resubmit_timeout_s: float = Field(
        default=10.0,
        ge=0,
        description="A request whose detokenizer is lost before its first byte left is submitted "
        "again for so long; 0: it fails.",
    )
    max_resubmit_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="Requests kept for that, in bytes; those beyond fail with their detokenizer.",
    )
    client_stall_timeout_s: float = Field(
        default=30.0, gt=0, description="A client that takes no bytes for so long is cut off."
    )
    sse_keep_alive_interval: float = Field(
        default=15.0, ge=0, description="Seconds of silence before a comment line; 0 is off."
    )
    stream_credit_bytes: int = Field(
        default=256 << 10, ge=4096, description="Bytes of one stream on their way to a client."
    )
    num_render_threads: int = Field(default=2, ge=1, description="Threads for long prompts.")
    max_waiting_renders: int = Field(
        default=64, ge=0, description="Long prompts that may wait; more are answered 429."
    )
    max_stored_responses: int = Field(
        default=4096, ge=1, description="Responses kept for GET and previous_response_id."
    )
    max_stored_response_bytes: int = Field(
        default=64 << 20, ge=1024, description="Bytes of kept responses; the oldest go first."
    )
    stored_response_ttl_s: float = Field(
        default=86400.0, gt=0, description="For a response to be kept."
    )
    response_store_path: Path | None = Field(
        default=None,
        description="File for kept responses, shared by several processes; default: memory.",
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="For running requests to end after SIGTERM."
    )

    @field_validator("served_model_name")
    @classmethod
    def _names_are_not_empty(cls, names: list[str]) -> list[str]:
        if not all(names):
            raise ValueError("a served model name is empty")
        return names

    @field_validator("allowed_origins", "allowed_methods", "allowed_headers", mode="before")
    @classmethod
    def _read_lists(cls, given: object) -> object:
        """Words one by one, or JSON lists of them, which is how vLLM takes these flags."""
        if not isinstance(given, list):
            return given
        words: list[object] = []
        for word in given:
            if not (isinstance(word, str) and word.lstrip().startswith("[")):
                words.append(word)
                continue
            try:
                words.extend(json.loads(word))
            except ValueError:
                raise ValueError(f"{word} is no JSON list") from None
        return words

    @field_validator("api_key")
    @classmethod
    def _keys_are_not_empty(cls, keys: list[SecretStr]) -> list[SecretStr]:
        # An empty key would let everybody in who sends an empty token.
        if not all(key.get_secret_value() for key in keys):
            raise ValueError("an API key is empty")
        return keys

    @property
    def resubmit_bounds(self) -> ResubmitBounds:
        """What is done for requests of a lost detokenizer."""
        return ResubmitBounds(timeout_s=self.resubmit_timeout_s, max_bytes=self.max_resubmit_bytes)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names clients may use, the shown one first."""
        return tuple(self.served_model_name) or (self.model.resolve().name,)


def checkpoint_context_length(model_dir: Path) -> int:
    """`max_position_embeddings` of the checkpoint's config.json."""
    path = model_dir / "config.json"
    try:
        value = json.loads(path.read_text("utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: max_position_embeddings {value!r} is no length")
    return value
